"""What ranks of test_process_groups.py do, each in a process of its own."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy
import torch
import torch.distributed as dist

import conclave
from conclave import _process_groups
from support.process_ranks import wait_for

SPEC = {"num_experts": 7, "top_k": 2}
TOKENS = (5, 0, 9, 1)  # each rank's, one of them none
DEADLINE = 1.5


def made_weights() -> dict[str, numpy.ndarray]:
    random = numpy.random.default_rng(3)
    return {
        "gate_up": random.standard_normal((7, 48, 40), dtype="float32"),
        "down": random.standard_normal((7, 40, 24), dtype="float32"),
        "router": random.standard_normal((7, 40), dtype="float32"),
    }


def made_rows(tokens: int, seed: int = 4) -> torch.Tensor:
    rows = numpy.random.default_rng(seed).standard_normal((tokens, 40), dtype="float32")
    return torch.from_numpy(rows)


def layer_over(communicator=None, slices=None, device=None, **more) -> conclave.Layer:
    return conclave.Layer.from_tensors(
        {**SPEC, **more},
        device=device,
        communicator=communicator,
        tensor_communicator=slices,
        **made_weights(),
    )


# Results.


def experts(rank, folder):
    """Expert parallel over the default group, over a group that is made and over a communicator."""
    rows = made_rows(TOKENS[rank], seed=rank)
    of_all = dist.new_group(list(range(dist.get_world_size())))
    given = conclave.from_process_group(timeout=20)
    assert (given.rank, given.size, given.name) == (rank, dist.get_world_size(), "tcp")
    layers = [layer_over(group) for group in (dist.group.WORLD, of_all, given)]
    outputs = [layer(rows).numpy() for layer in layers for _ in range(2)]
    given.barrier()
    return outputs


def slices(rank, folder):
    """Tensor parallel over all ranks, and both splits by the dimensions of a mesh."""
    rows = made_rows(9)
    of_all = layer_over(None, dist.group.WORLD)(rows).numpy()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    both = layer_over(mesh.get_group("ep"), mesh.get_group("tp"))(rows).numpy()
    return of_all, both


def goes_on(rank, folder, ending):
    """Rank 1 ends or stops; the others take their layer, which was given a group, to what is left
    of it: experts of two replicas, so that nothing is read again."""
    slots = conclave.balance_experts(
        [1.0] * 7, rule="surviving", num_ranks=3, num_redundant_experts=7
    )
    experts = conclave.from_process_group(timeout=DEADLINE)
    layer = conclave.Layer.from_tensors(
        SPEC, communicator=experts, parallel=slots.parallel(ep_rank=rank), **made_weights()
    )
    of_group = layer_over(dist.group.WORLD)
    rows = made_rows(TOKENS[rank], seed=rank)
    layer(rows)
    of_group(rows)
    if rank == 1:
        os.kill(os.getpid(), ending)
    try:
        while True:
            layer(rows)
    except conclave.ConclaveCommError as error:
        assert error.peer == 1, error
    left = conclave.survivors(experts)
    assert left.old_ranks == (0, 2)
    found = layer.on_ranks(left.communicator, old_ranks=left.old_ranks)(rows).numpy()
    left.communicator.barrier()
    again = conclave.survivors(dist.group.WORLD, deadline=DEADLINE)
    assert again.old_ranks == (0, 2)
    more = of_group.on_ranks(again.communicator, old_ranks=again.old_ranks, **made_weights())
    assert numpy.array_equal(more(rows).numpy(), found)
    again.communicator.barrier()
    return found


def regrouped(rank, folder):
    """From ranks 0 and 1 to all three and on to ranks 1 and 2, which give each other the layer."""
    first, last = (dist.new_group(ranks) for ranks in ([0, 1], [1, 2]))
    everyone = conclave.from_process_group(timeout=20)
    rows = made_rows(TOKENS[rank], seed=rank)
    if rank == 2:
        spec = conclave.Layer.from_tensors(SPEC, **made_weights()).spec
        layer = conclave.Layer.join(spec, everyone, dist.group.WORLD)
    else:
        layer = layer_over(first).regroup(everyone, dist.group.WORLD)
    outputs = [layer(rows).numpy()]
    if rank == 0:
        layer.hand_over(everyone)
    else:
        outputs.append(layer.regroup(everyone, last)(rows).numpy())
    outputs.append(layer(rows).numpy())
    everyone.barrier()
    return outputs


def subgroups(rank, folder):
    """Two groups of two ranks, side by side."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rows = made_rows(TOKENS[rank], seed=rank)
    layer = layer_over(pairs[rank % 2])
    dist.barrier()
    dist.destroy_process_group(pairs[rank % 2])  # the layer does not need it any more
    found = layer(rows).numpy()
    try:
        layer_over(pairs[1 - rank % 2])
    except conclave.Error as error:
        refusal = f"{type(error).__name__}: {error}"
    return found, refusal


def beside_collectives(rank, folder):
    """The group's own collectives are under way while layers exchange rows."""
    layer = layer_over(dist.group.WORLD)
    rows = made_rows(TOKENS[rank], seed=rank)
    outputs, sums = [], []
    for step in range(10):
        mine = torch.full((1000,), float(rank + step))
        work = dist.all_reduce(mine, async_op=True)
        if rank == step % 4:
            time.sleep(0.01)
        outputs.append(layer(rows).numpy())
        work.wait()
        sums.append(float(mine[0]))
        dist.barrier()
    return outputs, sums


def alone(rank, folder):
    layer = layer_over(dist.group.WORLD)
    found = conclave.connect("torch.distributed")
    return layer(made_rows(6)).numpy(), (found.rank, found.size)


def without_cpu(rank, folder):
    group = dist.new_group([0, 1], backend="cuda:gloo")
    layer_over(group)


class TcpForNccl:
    """The compiled module where a machine has no GPUs: ranks meet as for NCCL, and have sockets."""

    def __init__(self, module) -> None:
        self._module, self.asked = module, []

    def __getattr__(self, name):
        return getattr(self._module, name)

    def connect(self, transport, rank, size, *rest, device="", **more):
        self.asked.append((transport, rank, size, device))
        return self._module.connect("tcp", rank, size, *rest, **more)


def groups_of_gpus(rank, folder):
    """Communicators for devices over groups of any backend, each made once for all layers."""
    module = _process_groups._conclave = TcpForNccl(_process_groups._conclave)
    of_gpus = dist.new_group([0, 1, 2], backend="cuda:gloo")
    made = [
        conclave.from_process_group(of_gpus, timeout=20),
        conclave.from_process_group(of_gpus, device=f"cuda:{rank}", timeout=20),
        conclave.connect("torch.distributed", device="cuda:5", timeout=20),
    ]
    gathered = []
    for communicator in made:
        told = numpy.empty(3, "int64")
        communicator.all_gather(numpy.array([10 + rank]), told)
        gathered.append(told.tolist())
    shared = {
        device: _process_groups.communicator_of(dist.group.WORLD, "communicator", device)
        for device in ("cpu", "cuda:0")
    }
    assert shared["cpu"] is not shared["cuda:0"]
    for device, communicator in shared.items():
        again = _process_groups.communicator_of(dist.group.WORLD, "communicator", device)
        assert again is communicator
    shared["cuda:0"].barrier()
    shared["cuda:0"].abort("a planted failure")
    assert _process_groups.shared_communicator(dist.group.WORLD) is shared["cuda:0"]
    shared["cpu"].barrier()
    return module.asked, gathered


def without_nccl(rank, folder):
    """What GPUs' communicators and layers say where there is no NCCL; the groups go on."""
    of_gpus = dist.new_group([0, 1], backend="cuda:gloo")
    calls = {
        "default": lambda: conclave.from_process_group(of_gpus),
        "device": lambda: conclave.from_process_group(device="cuda:0"),
        "connect": lambda: conclave.connect("torch.distributed", device="cuda:0"),
        "bootstrap": lambda: conclave.connect("nccl", bootstrap=of_gpus, device="cuda:0"),
        "layer": lambda: layer_over(of_gpus, device="cuda:0"),
        "slices": lambda: layer_over(None, of_gpus, device="cuda:0"),
    }
    found = {}
    for name, call in calls.items():
        start = time.monotonic()
        try:
            call()
            found[name] = "accepted"
        except conclave.Error as error:
            found[name] = f"{type(error).__name__}: {error}"
        assert time.monotonic() - start < 10
    rows = made_rows(TOKENS[rank], seed=rank)
    return found, layer_over(dist.group.WORLD)(rows).numpy()


def layers_on_gpus(rank, folder):
    """Experts and slices on a GPU for each rank, over a group with and one without a backend for
    the CPU, beside the whole layer on one."""
    torch.cuda.set_device(rank)
    device = f"cuda:{rank}"
    rows = made_rows(TOKENS[0], seed=rank).to(device)
    whole = layer_over(device=device)(rows)
    of_gpus = dist.new_group([0, 1], backend="nccl")
    found = []
    for group in (dist.group.WORLD, of_gpus):
        layer = layer_over(group, device=device)
        found += [layer(rows), layer(rows, rank_tokens=[TOKENS[0]] * 2)]
    same = made_rows(9).to(device)
    found.append(layer_over(None, of_gpus, device=device)(same))
    wanted = [whole] * 4 + [layer_over(device=device)(same)]
    torch.cuda.synchronize()
    dist.barrier()
    pairs = zip(found, wanted, strict=True)
    return [bool(torch.allclose(one, other, rtol=1e-5, atol=1e-4)) for one, other in pairs]


def experts_on_gpus_move(rank, folder):
    """Experts that change sides between two GPUs: at once, beside forwards, and by a balancer. A
    token has one of them, so that its bits are the same wherever that lies."""
    torch.cuda.set_device(rank)
    device = f"cuda:{rank}"
    second = conclave.from_process_group(dist.new_group([0, 1]), device=device, timeout=20)
    rows = made_rows(12, seed=rank).to(device)
    given = conclave.from_process_group(dist.group.WORLD, device=device, timeout=20)
    layer = conclave.Layer.from_tensors(
        {**SPEC, "top_k": 1},
        device=device,
        communicator=given,
        options={"spare_experts": 2},
        count=True,
        **made_weights(),
    )
    expected = layer(rows).clone()
    first = layer.slots
    turned = conclave.ParallelSpec(ep_size=2, placement="custom", rank_of=[1, 1, 0, 0, 0, 0, 1])
    layer.update_placement(turned)
    found = [layer.placement_epoch > 0, torch.equal(layer(rows), expected)]
    with conclave.Migration(layer, first, second, processor_share=1) as migration:
        for _ in range(5):
            found.append(torch.equal(layer(rows), expected))
        migration.finish()
        found.append(migration.status.is_done)
    found.append(sorted(layer.slots.of_rank(rank)) == sorted(first.of_rank(rank)))
    balancer = conclave.Balancer([layer], second, window_size=4, step_interval=8, use_async=False)
    for _ in range(8):
        found.append(torch.equal(layer(rows), expected))
        balancer.step()
    found.append(balancer.status.rebalances > 0)
    torch.cuda.synchronize()
    dist.barrier()
    return found


def several_backends(rank, folder):
    group = dist.new_group([0, 1], backend="cpu:gloo,cuda:gloo")
    return layer_over(group)(made_rows(TOKENS[rank], seed=rank)).numpy()


def wrong_arguments(rank, folder):
    group = dist.new_group([1])
    calls = {
        "number": lambda: conclave.from_process_group(3),
        "not a member": lambda: conclave.from_process_group(group),
        "timeout": lambda: conclave.from_process_group(timeout=-1),
        "name": lambda: layer_over("gloo"),
        "twice": lambda: layer_over(dist.group.WORLD, dist.group.WORLD),
        "split": lambda: conclave.connect("torch.distributed", group=1),
        "rank": lambda: conclave.connect("torch.distributed", rank=1 - rank, size=2),
    }
    found = {}
    for name, call in calls.items():
        if name == "not a member" and rank == 1:
            continue
        try:
            call()
            found[name] = "accepted"
        except conclave.Error as error:
            found[name] = f"{type(error).__name__}: {error}"
    ended = dist.new_group([0, 1])
    dist.barrier()  # A group that its peer destroys while it connects has lost its peer.
    dist.destroy_process_group(ended)
    try:
        conclave.from_process_group(ended)
    except conclave.Error as error:
        found["destroyed"] = f"{type(error).__name__}: {error}"
    return found


def sums(rank, folder):
    """Sums in rank order: in every other order they have other bits."""
    numbers = [1e8, 1.0, -1e8, 1.0]
    group = conclave.from_process_group(timeout=20)
    found = []
    for length in (1, 3, 200_000):
        total = torch.empty(length)
        group.all_reduce(torch.full((length,), numbers[rank]), total)
        found.append((float(total.min()), float(total.max())))
    gathered = torch.empty(4, dtype=torch.int64)
    group.all_gather(torch.tensor([rank]), gathered)
    # Rank r sends r + to elements to each rank.
    counts = [rank + to for to in range(4)]
    here = [frm + rank for frm in range(4)]
    blocks = torch.empty(sum(here), dtype=torch.int32)
    group.all_to_all(torch.full((sum(counts),), rank, dtype=torch.int32), counts, blocks, here)
    return found, gathered.tolist(), blocks.tolist()


# Threads and forks.


def threads(rank, folder):
    """Two threads of each rank run layers over groups of their own."""
    groups = [conclave.from_process_group(timeout=20) for _ in range(2)]
    outputs = [None, None]

    def run(number):
        layer = layer_over(groups[number])
        rows = made_rows(TOKENS[rank], seed=rank)
        outputs[number] = [layer(rows).numpy() for _ in range(20)]

    workers = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return outputs


def forks(rank, folder):
    """A child refuses the parent's connections and does not harm them."""
    group = conclave.from_process_group(timeout=20)
    layer = layer_over(group)
    rows = made_rows(TOKENS[rank], seed=rank)
    before = layer(rows).numpy()
    child = os.fork()
    if child == 0:
        found = []
        for call in (group.barrier, lambda: layer_over(dist.group.WORLD)):
            try:
                call()
                found.append("accepted")
            except conclave.Error as error:
                found.append(error.name)
        group.abort("not the child's to say")
        del layer, group
        (folder / f"child-{rank}").write_text(" ".join(found))
        os._exit(0)
    os.waitpid(child, 0)
    after = layer(rows).numpy()
    return before, after, (folder / f"child-{rank}").read_text()


# Faults. Rank 1 is the victim; every other one has to raise.


def ready(rank, folder, seconds=DEADLINE):
    group = conclave.from_process_group(timeout=30)
    layer = layer_over(group)
    group.barrier()
    quick = conclave.from_process_group(timeout=seconds)
    return layer_over(quick), quick, layer


def fault(rank, folder, kind):
    layer, group, _ = ready(rank, folder)
    rows = made_rows(40, seed=rank)
    if rank == 1:
        suffer(kind, group, folder)
    started = time.monotonic()
    try:
        while True:
            layer(rows)
    except conclave.Error as error:
        found = (type(error).__name__, error.name, str(error), time.monotonic() - started)
    try:
        layer(rows)
        again = "accepted"
    except conclave.Error as error:
        again = type(error).__name__
    return (*found, again, group.is_usable)


def suffer(kind, group, folder):
    if kind == "killed":
        threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGKILL)).start()
    elif kind == "killed before":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stopped":
        threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    elif kind == "late":
        time.sleep(DEADLINE + 1.5)
    elif kind == "aborts":
        threading.Timer(0.15, group.abort, ("the operator said so",)).start()
    elif kind == "exits":
        threading.Timer(0.15, os._exit, (0,)).start()
    else:
        raise RuntimeError("this rank has another problem")


def disagreeing_layers(rank, folder):
    layer_over(conclave.from_process_group(timeout=20), top_k=1 + rank)


def disagreeing_calls(rank, folder):
    group = conclave.from_process_group(timeout=20)
    if rank == 1:
        group.barrier()
    else:
        group.all_reduce(torch.ones(3), torch.empty(3))


def disagreeing_sizes(rank, folder):
    group = conclave.from_process_group(timeout=20)
    length = 1000 + rank
    group.all_reduce(torch.ones(length), torch.empty(length))


def never_connects(rank, folder):
    if rank == 1:
        wait_for(folder / "done")
        return None
    try:
        conclave.from_process_group(timeout=0.5)
    finally:
        (folder / "done").touch()


def comes_at_last(rank, folder):
    """A meeting that fails for want of a rank, then one with all."""
    if rank == 1:
        wait_for(folder / "failed-0")
        wait_for(folder / "failed-2")
    else:
        try:
            conclave.from_process_group(timeout=0.3)
        except conclave.ConclaveCommError:
            (folder / f"failed-{rank}").touch()
    layer = layer_over(conclave.from_process_group(timeout=20))
    return layer(made_rows(TOKENS[rank], seed=rank)).numpy()


def group_after_failure(rank, folder):
    """Layers of a group find a new communicator after theirs has failed."""
    try:
        layer_over(dist.group.WORLD, top_k=1 + rank % 2)
    except conclave.ConclaveCommError:
        pass
    dist.barrier()
    return layer_over(dist.group.WORLD)(made_rows(TOKENS[rank], seed=rank)).numpy()
