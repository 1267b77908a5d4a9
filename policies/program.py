"""Least attained service per program first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..errors import ConfigError
from ..policy import EngineView, RequestView, StepReport
from ._keyed import Ranking
from ._patience import Patience
from ._roster import Roster


@dataclass(slots=True)
class _Account:
    """What a program was served.

    Attributes:
        limit: Weighted tokens at which its level ends.
        level: Its level.
        attained: Weighted tokens so far.
        live: How many of its requests have not ended.
        waiting: Those that wait, by number.
    """

    limit: float
    level: int = 0
    attained: float = 0.0
    live: int = 0
    waiting: dict[int, RequestView] = field(default_factory=dict)


@dataclass(eq=False)
class Program:
    """Requests of the program that was served least go first: short agent sessions pass long ones.

    Program-level attained service (PLAS) of Autellix (Luo et al., 2025): what counts is not the one
    call that waits but all that its program has had, since the program ends with its last call. As
    there, programs sink through levels as they are served, so that those of about the same service go
    by arrival, and are not cut into each other's calls. A request without ``program_id`` is a program
    of its own. Those that have waited ``age_steps`` steps get every fourth admission.

    Not if programs are what is to be treated alike however long they are: use ``vtc`` with a tenant each.

    Args:
        quantum: Tokens of service that the top level covers.
        growth: How many times as many each next level covers.
        output_weight: What an output token counts, in prompt tokens.
        age_steps: Steps after which a waiting request counts as starved.
        forget_s: Seconds after the end of its last request after which a program is forgotten.
    """

    api_version = 1
    quantum: int = 1024
    growth: float = 2.0
    output_weight: float = 2.0
    age_steps: int = 256
    forget_s: float = 600.0

    def __post_init__(self) -> None:
        if self.quantum < 1 or self.age_steps < 1 or not self.growth > 1:
            raise ConfigError("program: quantum and age_steps must be at least 1, growth above 1")
        if not self.output_weight > 0 or not self.forget_s >= 0:
            raise ConfigError("program: output_weight must be above 0 and forget_s at least 0")
        self._patience = Patience(self.age_steps)
        self._roster = Roster()
        self._ranking = Ranking()
        self._demoted: list[_Account] = []  # since the last order
        self._programs: dict[str, _Account] = {}
        self._accounts: dict[int, _Account] = {}  # by request
        self._ended: list[int] = []  # requests whose last step is not reported yet
        self._left: dict[str, None] = {}  # programs without requests since the last order
        self._idle: dict[str, float] = {}  # programs without requests, and since when; oldest first

    def order(self, waiting: Sequence[RequestView], view: EngineView) -> Iterable[RequestView]:
        """By level of their programs, then by arrival."""
        self._forget(view.now)
        accounts = self._accounts
        gone = self._roster.left(waiting)
        self._patience.admitted(gone)
        for number in gone:
            self._unrank(number)
        for request in self._roster.newcomers(waiting):
            if request.number not in accounts:
                self._open(request)
            account = accounts[request.number]
            account.waiting[request.number] = request
            self._ranking.put(request, account.level)
        for account in self._demoted:
            for request in account.waiting.values():
                self._ranking.put(request, account.level)
        self._demoted.clear()
        ranked = self._ranking.among(self._roster.numbers)
        return self._roster.serve(self._patience.order(ranked, waiting, view), waiting)

    def on_submit(self, request: RequestView) -> None:
        """Find its program's account, or open one."""
        self._roster.add(request)
        self._open(request)

    def on_step(self, report: StepReport) -> None:
        """Charge programs for what their requests were served, and demote."""
        accounts = self._accounts
        served = dict.fromkeys(report.sampled, self.output_weight)
        for number, computed in report.prefill.items():
            served[number] = served.get(number, 0.0) + computed
        for number, tokens in served.items():
            account = accounts.get(number)
            if account is not None:
                account.attained += tokens
                if account.attained > account.limit:
                    self._demoted.append(account)
                while account.attained > account.limit:
                    account.level += 1
                    account.limit *= self.growth
        for number in self._ended:
            accounts.pop(number, None)
        self._ended.clear()

    def on_finish(self, request: RequestView) -> None:
        """Forget the request after the next report, which counts its last step; its program later."""
        self._roster.forget(request)
        self._unrank(request.number)
        account = self._accounts.get(request.number)
        if account is None:
            return
        self._ended.append(request.number)
        account.live -= 1
        if request.program_id is not None and not account.live:
            self._left[request.program_id] = None

    def _unrank(self, number: int) -> None:
        """It waits no more."""
        self._ranking.forget(number)
        account = self._accounts.get(number)
        if account is not None:
            account.waiting.pop(number, None)

    def _forget(self, now: float) -> None:
        """Drop programs that have been without requests for long."""
        for program in self._left:
            self._idle.pop(program, None)
            self._idle[program] = now
        self._left.clear()
        while self._idle:
            program, since = next(iter(self._idle.items()))
            if self._programs[program].live:
                del self._idle[program]
            elif now - since >= self.forget_s:
                del self._idle[program], self._programs[program]
            else:
                return

    def _open(self, request: RequestView) -> None:
        program = request.program_id
        account = None if program is None else self._programs.get(program)
        if account is None:
            account = _Account(self.quantum)
            if program is not None:
                self._programs[program] = account
        account.live += 1
        self._accounts[request.number] = account
