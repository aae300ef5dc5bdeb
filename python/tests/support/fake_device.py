"""A device for the alternation of the benches, whose clock is a number."""

from __future__ import annotations


class FakeDevice:
    """Replays take `us[name]`; under load for `warm_after` seconds they take twice that."""

    def __init__(self, us: dict, warm_after: float = 0.0) -> None:
        self.us, self.warm_after = us, warm_after
        self.clock, self.busy_until, self.log, self.outstanding = 0.0, 0.0, [], 0

    def now(self) -> float:
        return self.clock

    def sleep(self, seconds: float) -> None:
        assert self.outstanding == 0
        self.log.append("sleep")
        self.clock += seconds

    def enqueue(self, names: list) -> list:
        self.outstanding += 1
        begun = max(self.clock, self.busy_until)
        factor = 1 if begun >= self.warm_after else 0.5
        times = [self.us[name] * factor for name in names]
        self.busy_until = begun + sum(times) * 1e-6
        self.log += names
        self.clock += 1e-6 * len(names)
        return [self.busy_until, times]

    def collect(self, ticket: list) -> list:
        self.outstanding -= 1
        self.clock = max(self.clock, ticket[0])
        return ticket[1]
