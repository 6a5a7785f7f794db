"""How fast KV moves between two processes of this host: our transports beside their peers, in one run.

Each path has two halves, a sender and a receiver, in processes of their own (halves.py); `coordinator/bench/` runs them in turns
and reports. Nothing of the serving system imports this.
"""
