"""Watches over a run from outside its loop: lock of its folder, watchdog, status of the ranks, rendezvous."""
