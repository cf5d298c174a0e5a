"""The host's side: loop, sequences, scheduler, pools, prefix cache. Runs without a device."""
