"""How a launched run ended: what the ranks reported, what pdsh and launch.py printed, and the exit code from both."""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainer.launcher.hosts import Host
from trainer.launcher.speech import Report

TOLD = (0, 2, 3, 5, 75, 130)
"""Codes that a rank ends with on purpose."""
ASKED = {75: "preempted", 130: "interrupted"}
LOST = 4

# pdsh@here: worker-1: ssh exited with exit code 247
HOST_ENDED = re.compile(r"pdsh@\S+: (?P<host>\S+): \S+ (?:exited with exit code|killed by signal) (?P<code>\d+)")
# worker-1: [...] [ERROR] [launch.py:325:sigkill_handler] [...] exits with return code = -9
RANK_KILLED = re.compile(r"(?:(?P<host>\S+): )?\[.*exits with return code = -(?P<signal>\d+)\s*$")


@dataclass
class Outcome:
    """Filled by the thread that reads, line by line; asked by the one that waits."""

    hosts: Sequence[Host]
    begun: dict[int, Report] = field(default_factory=dict)
    ended: dict[int, Report] = field(default_factory=dict)
    hosts_ended: list[str] = field(default_factory=list)
    """Those that pdsh saw end with an error, the first one first."""
    killed_by: dict[str, int] = field(default_factory=dict)
    """By host: the signal that launch.py saw a rank end by."""

    @property
    def ranks(self) -> int:
        return sum(host.slots for host in self.hosts)

    @property
    def failing(self) -> bool:
        """Whether the rest should end soon, too: somebody has left with an error."""
        return bool(self.hosts_ended) or any(report.code for report in self.ended.values())

    @property
    def done(self) -> bool:
        """Whether rank 0 has said so."""
        return 0 in self.ended and self.ended[0].code == 0

    @property
    def hung(self) -> list[Report]:
        return [report for report in self.ended.values() if report.hung]

    def take(self, report: Report) -> None:
        """A rank begins or ends. That it hung, its watchdog knows better than the rank, if it still says something."""
        if report.rank in self.ended and self.ended[report.rank].hung:
            return
        (self.begun if report.code is None else self.ended)[report.rank] = report

    def note(self, line: str) -> None:
        """A line of the launcher's or of a library's. Only what no rank can print counts as the end of a host."""
        if found := HOST_ENDED.match(line):
            name = self._name(found["host"])
            if name not in self.hosts_ended:
                self.hosts_ended.append(name)
        elif found := RANK_KILLED.match(line):
            self.killed_by.setdefault(self._name(found["host"] or self.hosts[0].name), int(found["signal"]))

    def _name(self, label: str) -> str:
        """pdsh shows a name without its domain."""
        return next((host.name for host in self.hosts if label in (host.name, host.name.partition(".")[0])), label)

    def code(self) -> int:
        """Rank 0's word; without one, that of the lowest rank which refused or stopped alone, or was asked to end while
        the ranks could not agree, and so left the others; else lost."""
        alone = (2, 3, 5) if self.hung or self.killed_by else (2, 3, 5, *ASKED)
        for rank in sorted(self.ended):
            code = self.ended[rank].code
            if code in TOLD and (rank == 0 or code in alone):
                return code
        return LOST

    def message(self) -> str:
        """What rank 0 could not say itself; empty when it did."""
        code = self.code()
        if code != LOST:
            speaker = next(rank for rank in sorted(self.ended) if self.ended[rank].code == code)
            if speaker == 0:
                return ""
            if code in ASKED:
                host = self.ended[speaker].host
                return f"{ASKED[code]}: rank {speaker} (host {host}) alone, and at once: nothing was saved."
            word = "refused" if code == 2 else "stopped"
            return f"{word}, on rank {speaker} (host {self.ended[speaker].host}): {self.ended[speaker].why}"
        return self._lost()[0]

    def who(self) -> dict[str, object]:
        """Host, rank and pid of what was lost, for the run's record: None of what nobody can tell."""
        return self._lost()[1]

    def _lost(self) -> tuple[str, dict[str, object]]:
        if self.hung:
            said = "; ".join(f"rank {one.rank} of host {one.host} {one.why}" for one in self.hung)
            return f"lost: {said}.", _who(self.hung[0])
        ranks_of = self._ranks_of()
        silent = [rank for rank in range(self.ranks) if rank not in self.ended]
        # A rank that was killed is why the others failed, not the other way round.
        lost = [*self.killed_by, *(name for name in self.hosts_ended if not set(ranks_of[name]) <= set(self.ended))]
        name = lost[0] if lost else None
        if name is not None:
            gone = [rank for rank in ranks_of[name] if rank in silent] or ranks_of[name]
            who = f"rank {gone[0]}" if len(gone) == 1 else f"one of ranks {', '.join(map(str, gone))}"
            found: dict[str, object] = {"host": name, "rank": gone[0] if len(gone) == 1 else None, "pid": None}
            if len(gone) == 1 and gone[0] in self.begun:
                found = _who(self.begun[gone[0]])
            return f"lost: {who} of host {name} {self._how(name)}.", found
        crashed = [report for report in self.ended.values() if report.code == LOST]
        if crashed:
            first = crashed[0]
            missing = [
                f"{rank} (host {name})" for name in ranks_of for rank in ranks_of[name] if rank not in self.begun
            ]
            never = f" Not begun: rank {', '.join(missing)}." if missing else ""
            return f"lost: rank {first.rank} of host {first.host} ended with {first.why}{never}", _who(first)
        said = "lost: the ranks and the launcher ended without a word; the launcher itself may have been killed."
        return said, {"host": None, "rank": None, "pid": None}

    def _how(self, name: str) -> str:
        number = self.killed_by.get(name)
        if number == signal.SIGKILL:
            return "was killed (SIGKILL), perhaps because the machine ran out of memory"
        if number is not None:
            return f"was ended by {signal.Signals(number).name}"
        return "ended, or its connection did"

    def _ranks_of(self) -> dict[str, list[int]]:
        first, found = 0, {}
        for host in self.hosts:
            found[host.name] = list(range(first, first + host.slots))
            first += host.slots
        return found


def _who(rank: Report) -> dict[str, object]:
    return {"host": rank.host, "rank": rank.rank, "pid": rank.pid}
