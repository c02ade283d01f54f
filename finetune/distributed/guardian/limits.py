"""How long a guardian waits for what, in seconds. Together they keep the promise: gone 15 s after a fault."""

from __future__ import annotations

HEARTBEAT_SECONDS = 1.0
LOST_SECONDS = 8.0
"""A guardian not heard for so long is gone, or the network to it is."""
STOPPED_SECONDS = 4.0
"""A debugger or a short SIGSTOP is no fault; a process that stands still longer is."""
MEET_SECONDS = 15.0
GRACE_SECONDS = 3.0
"""After a fault: for the worker's main thread to leave by itself."""
KILL_SECONDS = 6.0
"""After a fault: when its guardian kills a worker that is still there."""
UNKILLABLE_SECONDS = 20.0
"""After a fault: when a guardian gives up on a worker that the kernel itself holds."""
SECOND_HAND_SECONDS = 1.5
"""For the cause to be heard of, after an error that it may have brought about in another rank's collective."""
LINGER_SECONDS = 1.0
HELLO_SECONDS = 5.0
CONNECT_SECONDS = 3.0
MOST_OF_A_CORE = 0.005
"""For looking through all processes of the machine for the worker's children, once a second where that is cheap."""
LONGEST_WAIT = 0.25
PAUSE = 0.05
"""A worker may say thousands of lines a second: taken together they cost it no switch of processes each."""
