"""Times how a layer over MPI goes on after one of its ranks has killed itself.

    conclave synth qwen3-30b-a3b MODEL --layers 1
    mpirun --enable-recovery -n 4 python bench/survivors.py MODEL [--replicas] [--layers 1]

With --replicas every expert is on two ranks and nothing is read; without, lost experts come from
the model. --layers takes the same layer so many times along. Rank 0, or 1 if that dies, prints
milliseconds since the death: to the error, to the new group, to the new layers, to the first
forward, whose bits are compared with those before.
"""

import argparse
import os
import pathlib
import signal
import tempfile
import time

import numpy

import conclave


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--replicas", action="store_true")
    parser.add_argument("--victim", type=int, default=1)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    return parser.parse_args()


def make_layers(options: argparse.Namespace, experts: conclave.Communicator) -> list:
    parallel = None
    if options.replicas:
        spec = conclave.inspect(options.model).layers[0].spec
        slots = conclave.balance_experts(
            [1.0] * spec.num_experts,
            rule="surviving",
            num_ranks=experts.size,
            num_redundant_experts=spec.num_experts,
        )
        parallel = slots.parallel(ep_rank=experts.rank)
    return [
        conclave.Layer.from_checkpoint(options.model, 0, communicator=experts, parallel=parallel)
        for _ in range(options.layers)
    ]


def run(layers: list, rows: numpy.ndarray) -> numpy.ndarray:
    for layer in layers:
        result = layer(rows)
    return result


def main() -> None:
    options = parse_arguments()
    conclave.set_num_threads(1)
    experts = conclave.connect("mpi", timeout=20)
    rank = experts.rank
    # Ranks of one host have one clock.
    death = pathlib.Path(tempfile.gettempdir()) / f"conclave-death-{os.getppid()}"
    layers = make_layers(options, experts)
    hidden = layers[0].spec.hidden_size
    rows = numpy.random.default_rng(rank).standard_normal((options.tokens, hidden), dtype="float32")
    expected = run(layers, rows)
    experts.barrier()
    if rank == options.victim:
        death.write_text(repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    times = []
    try:
        while True:
            run(layers, rows)
    except conclave.ConclaveCommError as error:
        times.append(time.monotonic())
        assert error.peer == options.victim, error
    left = conclave.survivors(experts)
    times.append(time.monotonic())
    computed = time.process_time()
    source = {} if options.replicas else {"checkpoint": options.model, "layer": 0}
    layers = [
        layer.on_ranks(left.communicator, old_ranks=left.old_ranks, **source) for layer in layers
    ]
    times.append(time.monotonic())
    computed = time.process_time() - computed
    result = run(layers, rows)
    times.append(time.monotonic())
    assert numpy.array_equal(result, expected), "other bits than before"
    left.communicator.barrier()
    if left.communicator.rank == 0:
        begin = float(death.read_text())
        death.unlink()
        names = ("error", "group", "layers", "forward")
        pairs = zip(names, times, strict=True)
        text = " ".join(f"{name} {(at - begin) * 1000:.0f}" for name, at in pairs)
        print(f"{text}; layers took {computed * 1000:.0f} of processor time")


if __name__ == "__main__":
    main()
