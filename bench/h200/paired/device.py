"""CUDA graphs of several forwards, and their times by events."""

import time

import torch


class Graph:
    """Forwards of a candidate, one for each routing, as one graph. `outputs` are what they write."""

    def __init__(self, run, routings: int):
        self.routings = routings
        # A replay reads memory that only `run` keeps: offsets, layouts, inputs, the layer and its scratch. Without this
        # they are freed with the candidate, and other peers' tensors take their place before the timing.
        self._run = run
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for index in range(routings):  # compiles, allocates and tunes what is lazy
                run(index)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=side):
            self.outputs = [run(index) for index in range(routings)]
        torch.cuda.synchronize()

    def replay(self) -> None:
        self._graph.replay()

    def replay_into_poison(self) -> list:
        for output in self.outputs:
            for tensor in output if isinstance(output, (tuple, list)) else (output,):
                tensor.fill_(float("nan"))
        self.replay()
        torch.cuda.synchronize()
        return self.outputs


class CudaDevice:
    """What alternation.py asks for; times are of one forward of a graph."""

    def __init__(self, graphs: dict):
        self._graphs = graphs
        self._free = []

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        torch.cuda.synchronize()
        time.sleep(seconds)

    def _event(self):
        return self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)

    def enqueue(self, names: list) -> list:
        ticket = []
        for name in names:
            begin, end = self._event(), self._event()
            begin.record()
            self._graphs[name].replay()
            end.record()
            ticket.append((name, begin, end))
        return ticket

    def collect(self, ticket: list) -> list:
        ticket[-1][2].synchronize()
        times = [begin.elapsed_time(end) * 1e3 / self._graphs[name].routings for name, begin, end in ticket]
        for _, begin, end in ticket:
            self._free += (begin, end)
        return times
