"""The process beside each rank that notices killed, stopped, hung and cut-off ranks, and ends its own rank then.

A process of its own (`python finetune/distributed/guardian/__main__.py`): a worker inside a long C call, which keeps
Python's other threads waiting, a stopped one or a killed one cannot watch itself. It needs the standard library and
psutil alone, so that it is there in a tenth of a second. Rank 0's guardian is the hub that the others connect to; the
first fault that reaches the hub is the one that all ranks name.

It speaks with its worker over its stdin and stdout and with other guardians over TCP, in lines of JSON.
"""
