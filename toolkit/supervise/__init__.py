"""Watches over a run from outside its loop: leases, watchdog, status of the ranks, rendezvous."""
