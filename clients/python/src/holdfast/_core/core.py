"""The core: what is asked for and held, and the pair of connections over which it is."""

from __future__ import annotations

import collections
import heapq
from typing import Any, Callable

from . import step as steps
from .claim import NEW, Call, Claim, Hold, Kind, Moved, Renewal
from .pair import Event, Pair, Sent, advice_of, event_of
from .resp import Failure, Nonsense, Reply, take
from .step import FOREVER, NO_WAIT, REQUESTS, SESSION, Ended, Outcome, Output, Send, Settings, Terms, Wait

# Asked again after so long.
_AGAIN = 100
# The first pause between two sessions is at most so long; it doubles.
_FIRST_PAUSE = 50
# The longest pause, and that after a session that was not ended by the time limit.
_LONGEST_PAUSE = 10_000
_LONGEST_PAUSE_BROKEN = 1_000
# The time limit is doubled so often at most.
_DOUBLED = 4
# A loss is told on another connection than the reply that shows it: so long it is waited for.
_TOLD_WITHIN = 1_000
# Who wakes so much later than he meant to has stood still.
_LATE = 200
# So many alarms of what is over are not worth looking for.
_FEW_ALARMS = 64
# The first question is answered at once, and says what the default lease is.
_FIRST_QUESTION = (b"LOCK.NEXT", b"ALIVE")
_QUESTION = (b"LOCK.NEXT", b"WAIT", b"0", b"ALIVE")


def _is_overwritten(error: str) -> bool:
    """A stranger has put something else there.

    Nothing is left of a lock that was, whichever word of it comes first: this reply, or the event of its loss.
    """
    return error.startswith("WRONGTYPE")


# The number of no call.
_NOBODY = 0
_RELEASED = Outcome("released")


class Core:
    """A client at one server."""

    def __init__(self, settings: Settings, *, in_cluster: bool = False) -> None:
        """One that has not asked for anything: nothing is opened before it does.

        In a cluster each server has one: what another server has moves to that one's core.
        """
        self.settings = settings
        # What is to be done, in this order.
        self.outputs: collections.deque[Output] = collections.deque()
        # When it is to be told `wake`, as the shell knows after each step.
        self.wakes_at: int | None = None
        # How many pairs have been opened.
        self.pairs = 0
        self._in_cluster = in_cluster
        self._now = 0
        self._claims: dict[int, Claim] = {}
        # By key and owner.
        self._owners: dict[tuple[bytes, bytes], int] = {}
        self._calls: dict[int, Call] = {}
        # Those that may have something to send, the first first; and the same to look them up.
        self._ready: list[tuple[int, int, int]] = []
        self._is_ready: set[tuple[int, int, int]] = set()
        # When to look at which claim or call again, one time for each; and the same in order, among what is over.
        self._looks: dict[int, int] = {}
        self._alarms: list[tuple[int, int]] = []
        self._pair: Pair | None = None
        # How many `LOCK.NEXT` were sent, over all pairs.
        self._nexts = 0
        # Sessions that may not be gone.
        self._replaced: list[bytes] = []
        # No pair is opened before.
        self._opens_at = 0
        self._pause = _FIRST_PAUSE
        self._doubled = 0
        # This process stood still: until then no hold is lost for want of a session.
        self._asks_until = 0
        self._random = (settings.seed * 0x9E3779B97F4A7C15) % 2**64 | 1
        # How many claims nobody wants, and are not given back yet.
        self._unwanted = 0
        # The server's, as it said last.
        self._default_lease = 0
        self._is_closed = False

    def step(self, now: int, what: Callable[..., None], *said: Any) -> None:
        """Something happens at this time: one of the methods of the first two chapters, and what it is told.

        Afterwards all `outputs` are to be done.
        """
        self._now = now = max(self._now, now)
        if self._is_late(now):
            self._begin_anew()
        what(self, *said)
        if self._is_closed and not self._claims:
            self._end()
        elif self._pair is None:
            self._open()
        if self._ready:
            self._send()
        self._set_alarm()

    def succeed(self, now: int, before: Core) -> None:
        """Goes on for a core that was interrupted in a step: with another pair, and all that it knew.

        What that step was about may be known by halves. As after every pair that ends, it is asked for again, or given
        back if nobody waits for it.
        """
        self._now = max(now, before._now)
        self._replaced = before._replaced
        if before._pair is not None and before._pair.id is not None:
            self._replaced.append(before._pair.id)
        self.pairs, self._nexts, self._default_lease = before.pairs, before._nexts, before._default_lease
        self._is_closed = before._is_closed
        calls = before._calls
        for id_ in sorted(before._claims):
            claim = before._claims[id_]
            if claim.stage == "held" and claim.hold is None:
                claim.stage = "asked"
            claim.set_adrift(before._until(claim))
            numbers = [number for number in (*claim.calls, id_) if number in calls]
            self.take_over(Moved(id_, claim, [(number, calls.pop(number)) for number in numbers]))
            if claim.hold is not None:
                self._finish(id_, Outcome("granted", claim.hold.token))
            elif claim.wanted and id_ not in numbers:
                self._give_back(id_)
        for number in sorted(calls):
            self._calls[number] = call = calls[number]
            if call.about != "close":
                self._finish(number, Outcome("unanswered"))
            else:
                self._set_next_alarm(number)

    def is_held(self, hold: int, now: int) -> bool:
        """Whether this hold is certain at this time."""
        until = self.held_until(hold)
        return until is not None and now < until

    def held_until(self, hold: int) -> int | None:
        """Until when this hold is certain, as far as is known now. None: it is none."""
        claim = self._held(hold)
        return None if claim is None else self._until(claim)

    def lease(self, hold: int) -> int | None:
        """The lease of this hold."""
        claim = self._claims.get(hold)
        return None if claim is None or claim.hold is None else claim.hold.lease

    @property
    def is_settled(self) -> bool:
        """Whether nothing is being given back."""
        return self._unwanted == 0

    @property
    def is_idle(self) -> bool:
        """Whether no request is without a reply."""
        return self._pair is None or not self._pair.unanswered

    @property
    def has_ended(self) -> bool:
        """Whether it was closed, and nothing is left to be done."""
        return self._is_closed and not self._claims and self._pair is None

    def all(self) -> list[tuple[int, bytes]]:
        """All acquisitions and holds, with a key of each."""
        return [(id_, self._claims[id_].keys[0]) for id_ in sorted(self._claims)]

    def _held(self, hold: int) -> Claim | None:
        claim = self._claims.get(hold)
        return claim if claim is not None and claim.wanted and claim.hold is not None else None

    def _until(self, claim: Claim) -> int:
        """How long a hold is certain."""
        hold, pair = claim.hold, self._pair
        if hold is None:
            return 0
        alive = None if pair is None else pair.alive
        if alive is None or not claim.terms.watchdog or not hold.tied or hold.known >= alive.next:
            return hold.until
        return max(hold.until, alive.asked + hold.lease * alive.sure // 1000)

    def _lease_of(self, claim: Claim) -> int:
        """The lease that is asked for."""
        return self._default_lease if claim.terms.lease is None else claim.terms.lease

    # What the program asks for.

    def _begin(self, call: int, about: str, within: int | None, hold: int = 0, words: tuple[bytes, ...] = ()) -> bool:
        """A call begins that somebody waits for. False: it has ended already."""
        if self._is_closed:
            self.outputs.append(Ended(call, Outcome("closed")))
            return False
        bound = None if within is None else self._now + within
        self._calls[call] = Call(about, bound, hold, words)
        if bound is not None:
            self._alarm(bound, call)
        return True

    def _finish(self, call: int, outcome: Outcome) -> None:
        """A call ends, if anybody waits for it still."""
        if self._calls.pop(call, None) is not None:
            self._silence(call)
            self.outputs.append(Ended(call, outcome))

    def acquire(
        self, call: int, by: bytes, keys: tuple[bytes, ...], terms: Terms, wait: Wait, owner: bytes | None = None
    ) -> None:
        """The program wants a lock, or several at once. The owner is `by` and the number of the call behind it."""
        within = self.settings.limit if wait == NO_WAIT else None if wait == FOREVER else wait + self.settings.grace
        if not self._begin(call, "acquire", within):
            return
        if not keys:
            self._finish(call, Outcome("refused", "ERR a lock needs a key at least"))
            return
        claim = Claim(b"%s%d" % (by, call) if owner is None else owner, keys, terms, wait, self._now)
        self._enter(call, claim)
        self._get_ready(NEW, 0, call)

    def _enter(self, id_: int, claim: Claim) -> None:
        self._claims[id_] = claim
        for key in claim.keys:
            self._owners[key, claim.owner] = id_

    def release(self, call: int, hold: int, within: int) -> None:
        """It gives a hold back, and wants to know whether it still had it."""
        claim = self._about_hold(call, "release", hold, within)
        if claim is not None:
            claim.release = call
            self._give_back(hold)

    def renew(self, call: int, hold: int, lease: int | None, fence: int | None, within: int) -> None:
        """It renews a hold: for this lease, or as before; with a token that is at least `fence`."""
        claim = self._about_hold(call, "renew", hold, within)
        if claim is None:
            return
        # One at a time; one that nobody waits for any more counts no more.
        if claim.renewal is not None and claim.renewal.call in self._calls:
            self._finish(call, Outcome("refused", "ERR it is being renewed"))
        else:
            claim.renewal = Renewal(call, lease, fence)
            self._touch(hold)

    def check(self, call: int, hold: int, within: int) -> None:
        """It asks whether a hold is certain."""
        if self.is_held(hold, self._now):
            self.outputs.append(Ended(call, Outcome("held")))
            return
        # What can be said without asking is said now.
        self._claim_is_late(hold)
        claim = self._about_hold(call, "check", hold, within)
        if claim is not None:
            claim.checks += (call,)
            self._touch(hold)

    def keep(self, hold: int, idle: int) -> None:
        """Nobody here uses a hold any more: it is kept at hand for so long, unless somebody else waits for it."""
        claim = self._claims.get(hold)
        if claim is None:
            return
        if claim.wanted and claim.hold is not None and not claim.called:
            claim.idle = self._now + idle
            self._alarm(claim.idle, hold)
        else:
            self.drop(hold)

    def use(self, call: int, hold: int, most: int) -> None:
        """Somebody here takes a hold that is at hand, or that somebody else here has just given up.

        At most so many in a row, once somebody else waits for it. What is in doubt is not used: to ask for it anew
        takes no longer than to ask whether it is held.
        """
        claim = self._held(hold)
        if claim is not None and self._now < self._until(claim) and not (claim.called and claim.uses >= most):
            claim.idle = None
            claim.uses += claim.called
            self.outputs.append(Ended(call, Outcome("held")))
            return
        self.drop(hold)
        self.outputs.append(Ended(call, Outcome("not held")))

    def keeps_at_once(self, now: int, hold: int, idle: int) -> bool:
        """The same as `keep` in no time: no step is taken. False: there is more to do, or it is in doubt."""
        claim = self._claims.get(hold)
        if claim is None or not claim.wanted or claim.called or self._is_late(now) or self._until(claim) <= now:
            return False
        until = now + idle
        if self._looks.get(hold, FOREVER) > until:
            return False
        claim.idle = until
        return True

    def uses_at_once(self, now: int, hold: int) -> bool:
        """The same as `use` of what is at hand."""
        claim = self._claims.get(hold)
        if claim is None or not claim.wanted or claim.idle is None or self._is_late(now) or self._until(claim) <= now:
            return False
        claim.idle = None
        return True

    def _about_hold(self, call: int, about: str, hold: int, within: int) -> Claim | None:
        """A call about a hold begins. None: it has ended already, for it is none."""
        claim = self._held(hold)
        if not self._begin(call, about, within, hold):
            return None
        if claim is None:
            self._finish(call, Outcome("not held"))
        return claim

    def request(self, call: int, words: tuple[bytes, ...], within: int) -> None:
        """Any other request."""
        if self._begin(call, "request", within, words=words):
            # What only looks.
            self._calls[call].again = words[0] == b"LOCK.INFO"
            self._get_ready(NEW, 0, call)

    def drop(self, call: int) -> None:
        """Nobody wants this call's answer any more, or this hold."""
        self._calls.pop(call, None)
        self._silence(call)
        claim = self._claims.get(call)
        if claim is not None and claim.wanted:
            self._give_back(call)

    def close(self, call: int, within: int) -> None:
        """All is given back, and the session ends."""
        self._begin(call, "close", within)
        self._is_closed = True
        for other in sorted(self._calls):
            if other != call and self._calls[other].about != "release":
                self._finish(other, Outcome("closed"))
        for id_ in [id_ for id_ in sorted(self._claims) if self._claims[id_].wanted]:
            self._give_back(id_)

    # What becomes of claims.

    def _give_back(self, id_: int) -> None:
        """Nobody wants it any more: whatever came of it goes."""
        claim = self._claims.get(id_)
        if claim is None:
            return
        self._unwanted += claim.wanted
        claim.wanted = False
        claim.not_before = 0
        call = None if claim.release is None else self._calls.get(claim.release)
        bound = None if call is None else call.bound
        claim.bound = self._now + self.settings.limit if bound is None else bound
        self._alarm(claim.bound, id_)
        self._end_calls(claim, Outcome("not held"), but=claim.release)
        if claim.pair is not None:
            self._touch(id_)
        else:
            self._forget(id_)

    def _end_calls(self, claim: Claim, outcome: Outcome, but: int | None = None) -> None:
        """Those end that were to hear of this hold."""
        for call in claim.calls:
            if call != but:
                self._finish(call, outcome)
        claim.checks, claim.renewal = (), None

    def _forget(self, id_: int) -> None:
        """There is nothing left of it at the server."""
        claim = self._claims.pop(id_, None)
        if claim is not None:
            for key in claim.keys:
                if self._owners.get((key, claim.owner)) == id_:
                    del self._owners[key, claim.owner]
            self._unwanted -= not claim.wanted
            self._silence(id_)
        if self._pair is not None:
            self._pair.carried.discard(id_)

    def _lose(self, id_: int, why: str, *, is_gone: bool) -> None:
        """A hold is lost. Something of it may be left: other keys, or what can't be seen from here."""
        claim = self._claims.get(id_)
        if claim is None:
            return
        is_all = len(claim.keys) == 1 or claim.stage == "gone"
        self._end_calls(claim, Outcome("lost", why))
        claim.release = None
        if claim.wanted:
            self.outputs.append(steps.Lost(id_, why))
        if is_gone and is_all:
            self._forget(id_)
        else:
            self._give_back(id_)

    def leave(self, id_: int, error: str = "MOVED") -> None:
        """In a cluster: another server has what this acquisition or hold is about."""
        claim = self._claims.get(id_)
        if claim is None:
            return
        until = self._until(claim)
        self._forget(id_)
        if self._pair is not None:
            # What is answered yet is answered to nobody: it may be back by then.
            sent = [one._replace(id=_NOBODY) if one.id == id_ else one for one in self._pair.unanswered]
            self._pair.unanswered = collections.deque(sent)
        claim.set_adrift(until)
        # Two servers that name each other are asked at their leisure.
        if claim.has_moved:
            claim.not_before = self._now + _AGAIN
        claim.has_moved, claim.asking = True, error.startswith("ASK")
        calls = [(number, self._calls.pop(number)) for number in (*claim.calls, id_) if number in self._calls]
        for number in (*claim.calls, id_):
            self._silence(number)
        self.outputs.append(steps.Move(Moved(id_, claim, calls), error))

    def take_over(self, moved: Moved) -> None:
        """What had to leave another core goes on here."""
        id_, claim, calls = moved
        claim.asked_before = True
        # Whatever it is, it was asked for somewhere, and what came of that moves with the key.
        claim.pair = 0
        self._unwanted += not claim.wanted
        self._enter(id_, claim)
        for number, call in calls:
            self._calls[number] = call
            self._set_next_alarm(number)
        self._set_next_alarm(id_)
        self._touch(id_)
        if self._is_closed:
            self._give_back(id_)

    def _is_elsewhere(self, error: str) -> bool:
        return self._in_cluster and error.startswith(("MOVED", "ASK "))

    def _touch(self, id_: int) -> None:
        """It may have something to send."""
        claim = self._claims.get(id_)
        if claim is None:
            return
        if claim.not_before > self._now:
            self._alarm(claim.not_before, id_)
        self._get_ready(*claim.rank(self._until(claim)), id_)

    def _get_ready(self, rank: int, order: int, id_: int) -> None:
        entry = (rank, order, id_)
        if entry not in self._is_ready:
            self._is_ready.add(entry)
            heapq.heappush(self._ready, entry)

    def _granted(self, id_: int, token: int, lease: int, until: int) -> None:
        claim = self._claims.get(id_)
        if claim is None:
            return
        was_held = claim.hold is not None
        claim.stage, claim.hold = "held", Hold(token, lease, until, self._nexts)
        self._alarm(until, id_)
        if not was_held:
            self._finish(id_, Outcome("granted", token))
        if claim.renewal is not None and claim.renewal.is_sent:
            self._finish(claim.renewal.call, Outcome("renewed", token))
            claim.renewal = None
        if until > self._now:
            for call in claim.checks:
                self._finish(call, Outcome("held"))
            claim.checks = ()
        if claim.renewal is not None or until <= self._now or not claim.wanted:
            self._touch(id_)

    def _untied(self, id_: int) -> None:
        """The session keeps it alive no more: it is to be taken along."""
        claim = self._claims.get(id_)
        if claim is not None and claim.hold is not None:
            claim.hold.until, claim.hold.tied = self._until(claim), False
        self._touch(id_)

    def _refused(self, id_: int, error: str) -> None:
        """A request for it was answered by an error."""
        claim = self._claims.get(id_)
        if claim is None:
            return
        is_unsure = claim.asked_before or error.startswith("UNCONFIRMED")
        if claim.hold is not None and _is_overwritten(error):
            self._lose(id_, "changed", is_gone=True)
            return
        if claim.hold is not None:
            # A renewal: nothing is taken back.
            claim.hold.confirming, claim.hold.left = False, 0
            claim.not_before = self._now + _AGAIN
            renewal = claim.renewal
            if renewal is not None and renewal.is_sent:
                claim.renewal = None
                self._finish(renewal.call, Outcome("refused", error))
            self._untied(id_)
        elif claim.wanted and len(claim.keys) > 1 and claim.asked_before and error.startswith("ERR"):
            claim.stage, claim.hold = "clearing", None
            self._touch(id_)
        else:
            claim.stage, claim.hold = "new", None
            self._finish(id_, Outcome("refused", error))
            if is_unsure:
                self._give_back(id_)
            else:
                self._forget(id_)

    # What arrives.

    def opened(self, number: int) -> None:
        """Both connections of a pair are there, with user and database."""
        pair = self._pair
        if pair is None or pair.number != number:
            return
        pair.stage = "greeting"
        pair.promised = self._now
        words = (b"LOCK.OWNER", b"REPLACES", *self._replaced) if self._replaced else (b"LOCK.OWNER",)
        self.outputs.append(Send(number, SESSION, words))
        self._ask_for_events(pair, _FIRST_QUESTION)

    def _ask_for_events(self, pair: Pair, question: tuple[bytes, ...] = _QUESTION) -> None:
        self._nexts += 1
        pair.asked = self._now
        self.outputs.append(Send(pair.number, SESSION, question))

    def received(self, number: int, channel: str, data: bytes) -> None:
        """Bytes have arrived."""
        pair = self._pair
        if pair is None or pair.number != number:
            return
        if channel == REQUESTS:
            pair.heard = self._now
        data, at = pair.arrived.pop(channel, b"") + data, 0
        try:
            while at < len(data) and (taken := take(data, at)) is not None:
                reply, at = taken
                makes_sense = self._session_says(pair, reply) if channel == SESSION else self._replied(pair, reply)
                if not makes_sense:
                    self._end_pair(by_limit=False)
                if self._pair is not pair:
                    return
        except Nonsense:
            self._end_pair(by_limit=False)
            return
        if at < len(data):
            pair.arrived[channel] = data[at:]

    def _session_says(self, pair: Pair, reply: Reply) -> bool:
        """A reply of the session. False: it makes no sense."""
        if isinstance(reply, Failure):
            return self._session_fails(pair, reply.text)
        if pair.id is None:
            if not isinstance(reply, bytes):
                return False
            pair.id = reply
            self._replaced.clear()
            return True
        # Unblocked by hand, or none of this version: asked again.
        if reply is None:
            self._ask_for_events(pair)
            return True
        if not isinstance(reply, list):
            return False
        asked, events = pair.asked, []
        for element in reply:
            event = event_of(element)
            if event is None:
                return False
            if event.kind != "alive":
                events.append(event)
            else:
                lease = pair.hear_alive(event.detail, self._nexts, self._now)
                if lease is None:
                    return False
                self._default_lease = lease
        begins = pair.stage == "greeting"
        pair.stage = "standing"
        for event in events:
            if not self._hear(event, asked):
                return False
        self._ask_for_events(pair)
        if begins:
            self._begin_to_carry(pair)
        return True

    def _session_fails(self, pair: Pair, error: str) -> bool:
        """The session's own requests fail: it is not to be had, or not now."""
        advice = advice_of(error)
        if advice == "again" and pair.stage == "standing":
            pair.asks_at = self._now + _AGAIN
            return True
        if advice == "tell" and pair.stage == "greeting":
            # Without the module, say, nothing will become of what was not sent yet.
            self._refuse_unsent(Outcome("refused", error))
        return False

    def _refuse_unsent(self, outcome: Outcome) -> None:
        """Calls that wait for nothing but a session end. What is to be given back is given back all the same."""
        for number in sorted(self._calls):
            call, claim = self._calls[number], self._claims.get(number)
            is_unsent = call.about == "acquire" and claim is not None and claim.pair is None
            if is_unsent or call.about in ("request", "release"):
                self._finish(number, outcome)
                self.drop(number)

    def _begin_to_carry(self, pair: Pair) -> None:
        """The session stands: what is wanted is taken along, and what is not is given back."""
        for id_ in sorted(self._claims):
            self._touch(id_)
        for call in sorted(self._calls):
            self._get_ready(NEW, 0, call)
        pair.carried = {id_ for id_, claim in self._claims.items() if claim.pair is not None}
        self._is_whole()

    def _is_whole(self) -> bool:
        """Once everything was taken along, pauses and limits are what they were."""
        pair = self._pair
        is_whole = pair is not None and pair.stage == "standing" and not pair.carried
        if is_whole:
            self._pause, self._doubled = _FIRST_PAUSE, 0
        return is_whole

    def _hear(self, event: Event, asked: int) -> bool:
        """An event. False: it makes no sense."""
        # That of what is forgotten says nothing any more.
        key = event.keys[0] if event.keys else None
        id_ = self._owners.get((key, event.owner)) if isinstance(key, bytes) else None
        if id_ is None:
            return True
        claim = self._claims[id_]
        if event.kind == "granted":
            return self._hear_granted(id_, claim, event, asked)
        if event.kind == "timeout" and claim.hold is None:
            self._finish(id_, Outcome("not granted"))
            self._forget(id_)
        elif event.kind == "refused":
            if self._is_elsewhere(event.detail):
                self.leave(id_, event.detail)
            elif claim.hold is not None and event.detail.startswith("NOTHELD"):
                self._lose(id_, "changed", is_gone=True)
            elif advice_of(event.detail) == "tell":
                self._refused(id_, event.detail)
            else:
                return False
        elif event.kind == "lost":
            why = event.detail if event.detail in ("expired", "forced", "disconnected") else "changed"
            if claim.stage in ("held", "gone"):
                self._lose(id_, why, is_gone=True)
            else:
                # It overtook the reply that it was granted.
                self._finish(id_, Outcome("lost", why))
                self._give_back(id_)
        elif event.kind == "untied":
            self._untied(id_)
        elif event.kind == "wanted":
            self._called(id_, claim)
        return True

    def _called(self, id_: int, claim: Claim) -> None:
        """Somebody else waits for it: also if it is not known here yet that it was granted."""
        if not claim.wanted:
            return
        if claim.idle is not None:
            self._give_back(id_)
        elif not claim.called:
            # Of several keys each is told, and after a renewal once more: it is counted from the first time on.
            claim.called, claim.uses = True, 1

    def _hear_granted(self, id_: int, claim: Claim, event: Event, asked: int) -> bool:
        if not (event.detail.isascii() and event.detail.isdigit()):
            return False
        until = asked + int(event.detail)
        lease = self._lease_of(claim)
        hold = claim.hold
        if hold is not None:
            hold.left = max(hold.left - len(event.keys), 0)
            hold.lasts = until = min(hold.lasts, until)
            renewal, lease = claim.renewal, hold.lease
            if renewal is not None and renewal.is_sent and renewal.lease is not None:
                lease = renewal.lease
            if hold.left > 0:
                return True
        if event.token is None:
            return False
        self._granted(id_, event.token, lease, until)
        return True

    def _replied(self, pair: Pair, reply: Reply) -> bool:
        """A reply to the oldest request. False: it makes no sense."""
        if not pair.unanswered:
            return False
        id_, kind, at, lease = pair.unanswered.popleft()
        if kind is None:
            return self._answered(id_, reply)
        if id_ in pair.carried:
            pair.carried.discard(id_)
            self._is_whole()
        claim = self._claims.get(id_)
        # It ended by an event that overtook the reply.
        if claim is None:
            return True
        claim.sent = None
        if isinstance(reply, Failure):
            return self._failed(pair, id_, claim, kind, reply.text)
        claim.has_moved = False
        if kind == "renew":
            return self._renewed(id_, claim, reply, lease, at)
        if kind == "acquire":
            return self._acquired(id_, claim, reply, at)
        return self._given_back(id_, claim, kind, reply)

    def _failed(self, pair: Pair, id_: int, claim: Claim, kind: Kind, error: str) -> bool:
        if self._is_elsewhere(error):
            self.leave(id_, error)
            return True
        advice = advice_of(error)
        if advice == "end":
            return False
        # What another session left of it can't be had anew while something else is there.
        if advice == "tell" and (kind in ("acquire", "renew") or (claim.wanted and _is_overwritten(error))):
            self._refused(id_, error)
            return True
        # What is given back is given back: again, until it is done.
        if kind == "acquire":
            claim.stage, claim.hold = "new", None
        if advice == "tell":
            claim.refusal = (kind, error)
        # What another session left can only be released.
        is_here = claim.pair == pair.number
        is_other_way = advice == "tell" and kind == "release" and not claim.wanted and is_here
        claim.not_before = 0 if is_other_way else self._now + _AGAIN
        if claim.release is not None and _is_overwritten(error):
            self._finish(claim.release, Outcome("lost", "changed"))
        self._touch(id_)
        return True

    def _acquired(self, id_: int, claim: Claim, reply: Reply, at: int) -> bool:
        if isinstance(reply, int):
            if reply <= 0:
                return False
            lease = self._lease_of(claim)
            self._granted(id_, reply, lease, at + lease)
        elif reply is None:
            self._finish(id_, Outcome("not granted"))
            self._forget(id_)
        elif reply == "WAITING":
            self._touch(id_)
        else:
            return False
        return True

    def _renewed(self, id_: int, claim: Claim, reply: Reply, lease: int, at: int) -> bool:
        hold = claim.hold
        if isinstance(reply, str) and reply == "WAITING":
            if hold is not None:
                # The event may have been here before.
                hold.confirming = hold.left > 0
            self._touch(id_)
            return True
        replies = reply if isinstance(reply, list) else [reply]
        if None in replies:
            # Between two sessions, or in an instance that was followed by another one.
            if hold is not None and not hold.tied:
                why = "disconnected"
            else:
                why = "expired" if self._until(claim) <= self._now else "changed"
            self._lose(id_, why, is_gone=True)
            return True
        if not replies or not all(isinstance(one, int) and one >= 0 for one in replies):
            return False
        # What was left of a lease, and was taken along, is none that the program named.
        is_named = claim.terms.watchdog or (claim.renewal is not None and claim.renewal.is_sent)
        named = lease if is_named or hold is None else hold.lease
        self._granted(id_, max(replies), named, at + lease)
        return True

    def _given_back(self, id_: int, claim: Claim, kind: Kind, reply: Reply) -> bool:
        replies = reply if isinstance(reply, list) else [reply]
        if not all(one is None or isinstance(one, int) for one in replies):
            return False
        if claim.wanted:
            claim.stage, claim.hold = "new", None
            claim.asked_before = False
            self._touch(id_)
            return True
        was_held = None not in replies and (kind == "release" or reply != 0)
        call = claim.release if claim.release in self._calls else None
        if call is not None and not was_held:
            claim.stage, claim.hold = "gone", None
            claim.not_before = self._now + _TOLD_WITHIN
            self._alarm(claim.not_before, id_)
            return True
        if call is not None:
            self._finish(call, _RELEASED)
        self._forget(id_)
        return True

    def _answered(self, number: int, reply: Reply) -> bool:
        call = self._calls.get(number)
        if call is None or call.about != "request":
            return True
        advice = advice_of(reply.text) if isinstance(reply, Failure) else "tell"
        if advice == "again":
            call.not_before = self._now + _AGAIN
            self._alarm(call.not_before, number)
            return True
        self._finish(number, Outcome("answer", reply))
        return advice != "end"

    # Sessions begin and end.

    def _open(self) -> None:
        if (self._claims or self._calls) and self._now >= self._opens_at:
            self.pairs += 1
            self._pair = Pair(self.pairs, self._now)
            self.outputs.append(steps.Open(self.pairs))

    def _end(self) -> None:
        """All is given back, or there is no more time for it."""
        for call in sorted(self._calls):
            self._finish(call, Outcome("closed"))
        self._claims.clear()
        self._owners.clear()
        self._looks.clear()
        self._unwanted = 0
        if self._pair is not None:
            self.outputs.append(steps.End(self._pair.number))
            self._pair = None

    def pair_ended(self, number: int) -> None:
        """One connection of a pair has ended, or could not be opened."""
        if self._pair is not None and self._pair.number == number:
            self._end_pair(by_limit=False)

    def unreachable(self, number: int) -> None:
        """A pair could not be opened, and what was not sent yet is not to wait until one can be."""
        if self._pair is not None and self._pair.number == number:
            self._refuse_unsent(Outcome("unanswered"))
            self._end_pair(by_limit=False)

    def _end_pair(self, *, by_limit: bool) -> None:
        """Both connections end, and what is wanted goes to the next session."""
        was_whole = self._is_whole()
        ids = sorted(self._claims)
        in_vain = []
        for id_ in ids:
            claim = self._claims[id_]
            until = self._until(claim)
            # Who does not wait is not made to: what came of it is given back.
            if claim.wait == NO_WAIT and claim.stage == "asked" and claim.wanted:
                in_vain.append(id_)
            claim.set_adrift(until)
            if claim.hold is not None:
                self._alarm(until, id_)
        pair, self._pair = self._pair, None
        if pair is None:
            return
        self.outputs.append(steps.End(pair.number))
        if pair.id is not None:
            self._replaced.append(pair.id)
        for sent in pair.unanswered:
            call = self._calls.get(sent.id)
            if sent.kind is None and call is not None and call.again:
                call.not_before, call.again = 0, False
            elif sent.kind is None:
                self._finish(sent.id, Outcome("unanswered"))
        for id_ in in_vain:
            self._finish(id_, Outcome("unanswered"))
            self._give_back(id_)
        for id_ in ids:
            ephemeral = self._held(id_)
            if ephemeral is not None and ephemeral.terms.ephemeral:
                self._lose(id_, "disconnected", is_gone=False)
        pause = 0 if was_whole and not by_limit else self._random_below(self._pause)
        longest = _LONGEST_PAUSE if by_limit else _LONGEST_PAUSE_BROKEN
        self._pause = min(self._pause * 2, max(longest, self._pause))
        self._doubled = min(self._doubled + 1, _DOUBLED) if by_limit else self._doubled
        self._opens_at = self._now + pause

    def _random_below(self, end: int) -> int:
        """`xorshift64*`."""
        number = self._random
        number ^= number >> 12
        number ^= (number << 25) % 2**64
        number ^= number >> 27
        self._random = number
        return int(((number * 0x2545F4914F6CDD1D) % 2**64 >> 33) % max(end, 1))

    # What is sent.

    def _send(self) -> None:
        pair = self._pair
        if pair is None or pair.stage != "standing":
            return
        while self._ready and len(pair.unanswered) < self.settings.unanswered:
            entry = heapq.heappop(self._ready)
            self._is_ready.discard(entry)
            id_ = entry[2]
            call, claim = self._calls.get(id_), self._claims.get(id_)
            if claim is not None:
                self._send_next(id_, claim, pair)
            elif call is not None and call.about == "request" and call.not_before <= self._now:
                # Kept until it is answered, since it may have to be asked again.
                call.not_before = FOREVER
                self._ask(pair, Sent(id_, None, self._now), call.words)

    def _ask(self, pair: Pair, sent: Sent, words: tuple[bytes, ...]) -> None:
        if not pair.unanswered:
            pair.heard = self._now
        pair.unanswered.append(sent)
        self.outputs.append(Send(pair.number, REQUESTS, words))

    def _send_next(self, id_: int, claim: Claim, pair: Pair) -> None:
        """What this claim has to send."""
        now, hold, until = self._now, claim.hold, self._until(claim)
        kind = claim.next(pair.number, until, now)
        if kind is None or pair.id is None:
            return
        lease = self._lease_of(claim)
        if kind == "renew" and hold is not None:
            lease = claim.next_lease(hold, until, now)
        words = claim.words(kind, lease, pair.id, now)
        claim.sent = kind
        if claim.wanted:
            claim.pair = pair.number
        if kind == "acquire":
            claim.stage, claim.hold = "asked", None
        elif kind == "renew" and hold is not None:
            # It may be shorter from now on, and signs of life may speak of the shorter one.
            hold.left, hold.lasts = len(claim.keys), FOREVER
            hold.until = min(until, now + lease)
            hold.known = FOREVER if lease < hold.lease else hold.known
            if hold.until > now:
                self._alarm(hold.until, id_)
            if claim.renewal is not None:
                claim.renewal.is_sent = True
        if claim.asking:
            claim.asking = False
            self._ask(pair, Sent(_NOBODY, None, now), (b"ASKING",))
        self._ask(pair, Sent(id_, kind, now, lease), words)

    # Time.

    def _is_late(self, now: int) -> bool:
        return self.wakes_at is not None and now > self.wakes_at + _LATE

    def _begin_anew(self) -> None:
        """This process stood still: all limits begin anew, and it asks before it judges."""
        self._asks_until = self._now + self.settings.limit
        if self._pair is not None:
            self._pair.heard, self._pair.promised = self._now, max(self._pair.promised, self._now)

    def wake(self) -> None:
        """It is as late as `wakes_at` said; all that can be read has been read and told."""
        now, pair = self._now, self._pair
        self.wakes_at = None
        if pair is not None and pair.deadline(self.settings.limit << self._doubled) <= now:
            self._end_pair(by_limit=True)
            pair = None
        if pair is not None and pair.asks_at is not None and pair.asks_at <= now:
            pair.asks_at = None
            self._ask_for_events(pair)
        while self._first_alarm() <= now:
            id_ = heapq.heappop(self._alarms)[1]
            del self._looks[id_]
            self._call_is_late(id_)
            self._claim_is_late(id_)
            self._set_next_alarm(id_)

    def _alarm(self, at: int, id_: int) -> None:
        """Looks at it then, unless it does so earlier."""
        if self._looks.get(id_, FOREVER) > at:
            self._looks[id_] = at
            heapq.heappush(self._alarms, (at, id_))
            if len(self._alarms) > 2 * len(self._looks) + _FEW_ALARMS:
                self._alarms = sorted((at, id_) for id_, at in self._looks.items())

    def _silence(self, id_: int) -> None:
        """A call has ended, or a claim: what has its number and goes on says itself when to look at it."""
        if id_ not in self._claims and id_ not in self._calls:
            self._looks.pop(id_, None)

    def _set_next_alarm(self, id_: int) -> None:
        """To look at it when its next time is over."""
        call, claim = self._calls.get(id_), self._claims.get(id_)
        times: list[int | None] = [] if call is None else [call.bound, call.not_before]
        if claim is not None:
            until = None if claim.hold is None else self._until(claim)
            times += [claim.not_before, *((until, claim.idle) if claim.wanted else (claim.bound,))]
        self._alarm(min((at for at in times if at is not None and at > self._now), default=FOREVER), id_)

    def _first_alarm(self) -> int:
        looks = self._looks
        while self._alarms and looks.get(self._alarms[0][1]) != self._alarms[0][0]:
            heapq.heappop(self._alarms)
        return self._alarms[0][0] if self._alarms else FOREVER

    def _call_is_late(self, number: int) -> None:
        call = self._calls.get(number)
        if call is None:
            return
        if call.bound is None or call.bound > self._now:
            self._get_ready(NEW, 0, number)
            return
        if call.about == "close":
            self._claims.clear()
            self._end()
        elif call.about == "acquire":
            claim = self._claims.get(number)
            # In a queue, or in none between two sessions.
            if claim is None:
                has_waited = False
            elif claim.stage == "asked":
                has_waited = claim.sent is None
            else:
                has_waited = claim.asked_before
            self._finish(number, Outcome("not granted" if has_waited else "unanswered"))
            self._give_back(number)
        elif call.about == "check" and not self.is_held(call.hold, self._now):
            # Who asks whether he may go on does not wait for ever.
            self._finish(number, Outcome("lost", "disconnected"))
            self._lose(call.hold, "disconnected", is_gone=False)
        elif call.about == "release":
            self._finish(number, self._late_release(number))
        else:
            self._finish(number, Outcome("unanswered"))

    def _late_release(self, number: int) -> Outcome:
        claim = next((claim for claim in self._claims.values() if claim.release == number), None)
        if claim is not None and claim.stage == "gone":
            return Outcome("not held")
        if claim is not None and claim.refusal is not None:
            return Outcome("refused", claim.refusal[1])
        return Outcome("unanswered")

    def _claim_is_late(self, id_: int) -> None:
        now = self._now
        claim = self._claims.get(id_)
        if claim is None:
            return
        if claim.stage == "gone":
            if now >= claim.not_before:
                if claim.release is not None:
                    self._finish(claim.release, Outcome("not held"))
                self._forget(id_)
        elif not claim.wanted:
            self._unwanted_is_late(id_, claim)
        elif claim.idle is not None and claim.idle <= now:
            self._give_back(id_)
        elif claim.hold is None:
            self._touch(id_)
        else:
            self._hold_is_late(id_, claim, claim.hold)

    def _unwanted_is_late(self, id_: int, claim: Claim) -> None:
        now, pair = self._now, self._pair
        if pair is not None and claim.pair == pair.number:
            # It was not given back in time, and the session keeps it alive: not where the server takes no writes.
            if claim.bound is not None and claim.bound <= now:
                if pair.takes_writes:
                    self._end_pair(by_limit=False)
                    return
                self._alarm(now + _AGAIN, id_)
        elif claim.bound is not None:
            # No session keeps it alive, and the next one replaces those that did: it has ended by itself.
            end = claim.bound + (self._lease_of(claim) if claim.hold is None else claim.hold.lease)
            if end <= now:
                self._forget(id_)
                return
            self._alarm(end, id_)
        self._touch(id_)

    def _hold_is_late(self, id_: int, claim: Claim, hold: Hold) -> None:
        now, until = self._now, self._until(claim)
        if until > now:
            self._touch(id_)
            return
        # What it was acquired by may be unanswered still, since the event of its grant came first.
        is_asked = claim.sent == "renew" or hold.confirming or claim.renewal is not None
        if not claim.terms.watchdog and not is_asked:
            self._lose(id_, "expired", is_gone=False)
        elif self._pair is not None and self._pair.stage == "standing":
            self._touch(id_)
        elif self._asks_until > now:
            self._alarm(self._asks_until, id_)
        else:
            self._lose(id_, "disconnected", is_gone=False)

    def _set_alarm(self) -> None:
        """Says when the shell is to wake this core. If that is not earlier than it was told, it is told then."""
        pair, told, limit = self._pair, self.wakes_at, self.settings.limit << self._doubled
        if pair is not None and told is not None and pair.asks_at is None:
            is_later = pair.heard + limit >= told and pair.promised + limit >= told
            if is_later and (not self._alarms or self._alarms[0][0] >= told):
                return
        at = self._first_alarm()
        if pair is not None:
            at = min(at, pair.deadline(limit), FOREVER if pair.asks_at is None else pair.asks_at)
        elif self._claims or self._calls:
            at = min(at, self._opens_at)
        if at < FOREVER and (told is None or at < told):
            self.wakes_at = max(at, self._now)
