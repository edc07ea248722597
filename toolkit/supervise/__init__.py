"""What watches over a run from outside its loop: leases, the watchdog, heartbeats of all ranks, the rendezvous."""
