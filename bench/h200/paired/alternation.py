"""Several subjects timed against each other: under load, and after rest.

A device offers now() and sleep(seconds), and enqueue(names) -> ticket, collect(ticket) -> microseconds of each
replay in that order; enqueue does not wait, so that the chip never idles between batches.
"""

import collections
import random

LEAST_REPLAYS = 7
BATCH_SECONDS = 0.01
LONGEST = 3.0  # so many times the given seconds, where replays are long


def one_round(names: list, rng: random.Random) -> list:
    order = list(names)
    rng.shuffle(order)
    return order


def rounds_per_batch(device, names: list, rng: random.Random) -> int:
    """So many that a batch keeps the device busy while the host reads the one before."""
    microseconds = sum(device.collect(device.enqueue(one_round(names, rng))))
    return max(1, min(64, round(BATCH_SECONDS * 1e6 / max(microseconds, 1.0))))


def time_hot(device, names: list, seconds: float, rng: random.Random, warm_share: float = 0.5,
             least_replays: int = LEAST_REPLAYS) -> dict:
    """Microseconds of each subject's replays under continuous load, all in one alternation.

    The first share of `seconds` only loads the chip. Ends after `seconds`, but not before `least_replays` of each
    are timed, nor later than LONGEST times `seconds` if there is one of each. The i-th times of all subjects are
    of one round.
    """
    rounds = rounds_per_batch(device, names, rng)
    times = {name: [] for name in names}
    pending = collections.deque()
    begun = device.now()

    def enqueue():
        order = [name for _ in range(rounds) for name in one_round(names, rng)]
        counts = device.now() - begun >= warm_share * seconds
        pending.append((order, device.enqueue(order), counts))

    def done() -> bool:
        least = min(map(len, times.values()))
        elapsed = device.now() - begun
        return (elapsed >= seconds and least >= least_replays) or (elapsed >= LONGEST * seconds and least >= 1)

    enqueue()
    while not done():
        enqueue()
        order, ticket, counts = pending.popleft()
        microseconds = device.collect(ticket)
        if counts:
            for name, us in zip(order, microseconds):
                times[name].append(us)
    while pending:
        device.collect(pending.popleft()[1])
    return times


def time_cool(device, names: list, replays: int, rest: float, rng: random.Random) -> dict:
    """Microseconds of single replays, each after `rest` seconds without work."""
    times = {name: [] for name in names}
    for _ in range(replays):
        for name in one_round(names, rng):
            device.sleep(rest)
            times[name] += device.collect(device.enqueue([name]))
    return times
