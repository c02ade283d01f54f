"""The guardian: a process beside each rank that notices killed, stopped, hung and cut-off ranks, and ends its own rank.

A guardian is a process of its own (`python finetune/distributed/guardian/__main__.py`), because a worker cannot watch
over its own process when it is killed, stopped, or inside a long C call that keeps Python's other threads waiting. A
guardian needs only the standard library and psutil, so it starts in a tenth of a second. The other guardians connect to
rank 0's guardian, the hub. All ranks name the first fault that reaches the hub.

A guardian exchanges lines of JSON with its worker over stdin and stdout, and with other guardians over TCP.
"""
