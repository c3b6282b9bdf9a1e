"""Benches for the tests of `jobs.py`; small, since every process imports this."""

import os
import time


class Bench:
    """Says when its cells were prepared and measured."""

    def prepare(self, cell):
        time.sleep(0.2)
        self.prepared = time.monotonic()

    def measure(self, cell):
        start = time.monotonic()
        time.sleep(0.05)
        return {"times": (self.prepared, start, time.monotonic())}


class Trouble(Bench):
    """Does to each cell what its name says."""

    def prepare(self, cell):
        if cell == "hangs":
            time.sleep(600)
        if cell == "dies":
            os._exit(1)
        if cell == "is wrong":
            raise ValueError("wrong")

    def measure(self, cell):
        if cell == "dies late":
            os._exit(1)
        return {"pid": os.getpid()}
