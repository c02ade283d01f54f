"""The process beside each rank that notices killed, stopped, hung and cut-off ranks, and then ends its own rank.

It is a process of its own (`python finetune/distributed/guardian/__main__.py`), since a worker cannot watch itself when
it is killed, stopped, or inside a long C call that keeps Python's other threads waiting. It needs only the standard
library and psutil, so it starts in a tenth of a second. Rank 0's guardian is the hub that the others connect to; all
ranks name the first fault that reaches the hub.

It talks to its worker over its stdin and stdout and to other guardians over TCP, in lines of JSON.
"""
