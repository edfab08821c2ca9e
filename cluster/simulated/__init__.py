"""The simulated cluster: the scheduler, the policies and the loop that serve, on a virtual clock, without workers."""
