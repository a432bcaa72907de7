"""A worker of parameter servers: takes leases, computes gradients and pushes them, until the leader ends the run."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline import own_code
from paceline.data.batch import Batch
from paceline.data.input import AHEAD, patience, wait_for_batch
from paceline.emulation.device import EmulatedDevice
from paceline.errors import CommError
from paceline.layout import peak_rss_bytes
from paceline.run.records import End
from paceline.server.client import Client
from paceline.server.ledger import TRAIN, Part
from paceline.server.roles import WAS_INTERRUPTED
from paceline.strategies.engine import StepTimer, parts_of
from paceline.strategies.parameter_server.flat import FlatModel
from paceline.tasks.base import Sums
from paceline.tasks.scoring import Scorer

if TYPE_CHECKING:
    from paceline.run.recorder import Recorder

    pass

# How long a worker that was asked to stop continues, to see whether the whole run is being stopped.
STOP_SECONDS = 2.0

MakeBatch = Callable[[Part], Batch]


@dataclass
class Work:
    """The state of a worker: batches being prepared, gradients being sent."""

    client: Client
    flat: FlatModel
    make_batch: MakeBatch
    scorer: Scorer
    accumulate: int
    clip: float  # the largest norm of this worker's own gradients; 0: any
    seed: int
    opened: Callable[[dict[str, Any]], Recorder]
    stop: Callable[[], bool]
    recorder: Recorder | None = None
    coming: dict[int, Future[Batch]] = field(default_factory=dict)
    pushed: dict[int, tuple[Part, StepTimer, float | None]] = field(default_factory=dict)
    device: EmulatedDevice | None = None  # with emulated compute
    confusion: torch.Tensor | None = None  # counts of the test set
    evaluating: tuple[str, int] | None = None
    wait_seconds: float = 0.0
    asked: float | None = None  # when this worker was first asked to stop

    def run(self, fingerprint: dict[str, str], about: dict[str, Any]) -> bool:
        """Work until the leader ends the run or this worker leaves; true if it was asked to stop."""
        self.client.target, self.client.about = 1 + AHEAD, self._about
        self._began = time.process_time()
        pool = ThreadPoolExecutor(1, "paceline-input")
        try:
            if not self._join(fingerprint, about, self.stop):
                return True
            self._timer = StepTimer(clock=self.recorder.clock if self.recorder else None)
            while not self.client.finish:
                self.client.poll(0)
                if self._leaves() or (self.client.estranged and not self._join(fingerprint, about, self._leaves)):
                    self.client.leave(WAS_INTERRUPTED)
                    return True
                self._settle_pushed()
                for lease, part in self.client.leases.items():
                    if lease not in self.coming and lease not in self.pushed:
                        self.coming[lease] = pool.submit(self.make_batch, part)
                chosen = self._choose()
                if chosen is None:
                    self.client.poll()
                    continue
                self._timer.mark("wait")
                self._fulfil(*chosen)
            self.client.leave()
            if self.client.error:
                raise CommError(self.client.error, 0)
            if self.recorder:
                self.recorder.write(End(time.time()))
            return self.stop()
        except Exception as error:
            self.client.leave(own_code.reason(error))
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            if self.recorder:
                self.recorder.close()

    def _leaves(self) -> bool:
        """Whether only this worker was asked to stop. If all ranks were, the leader ends the run in order."""
        if not self.stop():
            return False
        if self.asked is None:
            self.asked, self.client.beat_seconds = time.monotonic(), min(self.client.beat_seconds, STOP_SECONDS / 4)
        return not self.client.stopping and time.monotonic() - self.asked > STOP_SECONDS

    def _join(self, fingerprint: dict[str, str], about: dict[str, Any], stop: Callable[[], bool]) -> bool:
        """Join the run; false if this worker was asked to stop before the leader answered."""
        words = self.client.join(fingerprint, about, stop)
        if words is None:
            return False
        self.recorder = self.recorder or self.opened(words)
        self.coming, self.pushed, self.evaluating = {}, {}, None
        self.client.pull(0)
        self.client.report()
        return True

    def _about(self) -> dict[str, Any]:
        meter = self.client.meter
        return {
            "bytes_sent": meter.bytes_sent,
            "bytes_received": meter.bytes_received,
            "messages_sent": meter.messages_sent,
            "messages_received": meter.messages_received,
            "wait_seconds": self.wait_seconds,
            "input_seconds": self.recorder.input_seconds if self.recorder else 0.0,
            "confusion": self._confusion(),
            "cpu_seconds": time.process_time() - self._began,
            "peak_rss_bytes": peak_rss_bytes(),
        }

    def _confusion(self) -> list[int]:
        """The counts, row by row; empty while nothing is counted, because they are sent with every report."""
        if self.confusion is None or not self.confusion.any():
            return []
        counts: list[int] = self.confusion.long().flatten().tolist()
        return counts

    def _settle_pushed(self) -> None:
        """Use the new weights when all have arrived, and tell the leader which gradients the servers have."""
        client = self.client
        if not client.is_due() and client.install():
            self.flat.arrived()
        settled = [lease for lease, (part, *_) in self.pushed.items() if not client.is_due(part)]
        for lease in settled:
            part, timer, loss = self.pushed.pop(lease)
            timer.mark("wait")
            self._timer.last = timer.last
            self.wait_seconds += timer.parts.get("wait", 0.0)
            assert self.recorder is not None
            self.recorder.step(part.update, part.epoch, sum(timer.parts.values()), part.stop - part.start, timer.parts,
                            timer.queued, own=part.stop - part.start, loss=loss,
                            figures={"slot": part.slot, "staleness": client.missed(part)})  # fmt: skip
            client.done(lease)
        if settled:
            client.report()

    def _choose(self) -> tuple[int, Part] | None:
        """The first lease, if this worker's weights are new enough for it.

        While answers are outstanding, only a part of the update that they wait for: it is a part of a lost worker.
        """
        client = self.client
        todo = [(part, lease) for lease, part in client.leases.items() if lease in self.coming]
        if not todo:
            return None
        part, lease = min(todo)
        if client.is_due() and (part.kind != TRAIN or part.update >= client.awaited()):
            return None
        # Evaluate the weights that the servers have after all gradients have arrived.
        anew = part.kind != TRAIN and self.evaluating != (part.kind, part.update)
        if client.has(part.need) and not anew:
            return lease, part
        client.pull(part.need, anew=anew)
        self.evaluating = (part.kind, part.update)
        return None

    def _fulfil(self, lease: int, part: Part) -> None:
        client, timer = self.client, self._timer
        client.computing(lease)
        batch = self._batch(lease)
        timer.mark("input")
        if part.kind == TRAIN:
            if (memory := client.memory()) is not self.flat.gradient:
                self.flat.compute_in(memory)
            nominal = part.total * batch.nominal // batch.global_count
            sums = self._emulate(batch, timer) if self.device else self._compute(part, batch, nominal, timer)
            nonfinite = 0 if self.device else self.flat.first_nonfinite()
            client.push(part, self.flat.gradient, sums, nominal, nonfinite)
            timer.mark("push")
            self.pushed[lease] = part, timer, sums.loss / sums.weight if sums.weight and not self.device else None
        else:
            self.flat.model.eval()
            self.scorer.confusion = self.confusion if part.kind == "test" else None
            with torch.inference_mode():
                score = self.scorer(self.flat.model, batch)
            self.scorer.confusion = None
            self.flat.model.train()
            client.done(lease, score.sums)
            client.report()
        client.computing(None)
        self._timer = StepTimer(last=timer.last, clock=timer.clock)

    def _compute(self, part: Part, batch: Batch, nominal: int, timer: StepTimer) -> Sums:
        """Compute the gradient of the part's loss, divided by `nominal`; return its sums."""
        # The same part has the same dropout on every worker.
        seeds = np.random.SeedSequence([self.seed, part.update, part.slot])
        torch.manual_seed(int(seeds.generate_state(1, np.uint64)[0]))
        sums = Sums()
        for piece in parts_of(batch, self.accumulate):
            if piece.count:
                score = self.scorer(self.flat.model, piece)
                timer.mark("forward")
                (score.loss * (1 / nominal)).backward()
                sums = sums.plus(score.sums)
                timer.mark("backward")
        self.flat.collect(batch.count, part.total, last=part.slot == part.slots - 1)
        if self.clip and sums.weight:
            gradient = self.flat.gradient[: self.flat.trainable]
            norm = float(gradient.norm()) * nominal / sums.weight
            gradient.mul_(min(1.0, self.clip / (norm + 1e-6)))
        timer.mark("backward")
        return sums

    def _emulate(self, batch: Batch, timer: StepTimer) -> Sums:
        """Sleep for the device's time; the gradient stays zero."""
        assert self.device is not None
        self.device.begin(batch.count)
        self.device.forward()
        timer.mark("forward")
        self.device.reach(1.0)
        timer.mark("backward")
        return Sums(0.0, batch.nominal)

    def _batch(self, lease: int) -> Batch:
        return wait_for_batch(self.coming.pop(lease), self.client.rank, patience(self.client.timeout))
