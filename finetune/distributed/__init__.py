"""From a launcher's environment to one world of processes: read it, start the group, wrap Accelerate around it."""
