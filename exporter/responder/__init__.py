"""Answers EvictionRequests for VMs: holds them, evicts, says what happens, and cancels.

It is off unless the settings ask for it, and only the holder of the Lease writes.
"""
