"""Benches for the tests of `jobs.py`; small, since every process imports this."""

import time


class Bench:
    """Says when its cells were prepared and measured."""

    def prepare(self, cases):
        time.sleep(0.2)
        self.prepared = time.monotonic()

    def run(self, cases):
        for case in cases:
            start = time.monotonic()
            time.sleep(0.05)
            yield "here", {"case": case, "times": (self.prepared, start, time.monotonic())}


class Broken(Bench):
    """Cannot be prepared."""

    def prepare(self, cases):
        raise SystemExit(1)
