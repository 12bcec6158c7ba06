"""A model of work sharing in one family: which messages, in whatever order, keep the sum exact.

The batch is cut into *blocks*. In a round each block is granted to one rank that holds its data,
and that rank's program adds its gradient to a vector of its own. The parent keeps a *ledger* of who
was granted what, and takes the ranks' vectors, piece by piece, once they hold every block exactly
once. It can take back what a rank has not added yet (*recall*), and all that a silent rank was
granted (*drop*).

The vectors are *lent*: they are the programs', and others may have them only while their programs
wait for the next block. A program adds to its vector, or empties it; nothing can be taken out of it.

The rules, which `Rules` switches off one by one so that tests can show what each is for:

Rank, per round: a generation, a queue of blocks, the block that its program computes, the vector
and how many blocks of this generation are in it.
0. A rank's own blocks are granted to it as the round begins: they are in its queue as it calls. Unless
   it is to *ask*: then its queue is empty, and it says so. Who is told to *hold* before it calls is to
   ask, and answers that.
1. What is granted goes to the queue.
2. The program takes blocks from the queue and adds each when it is computed, whatever has become of
   it by then. Then it comes for the next, and waits while there is none.
3. A recalled block that is queued is returned. One that is being computed is returned only if the
   vector is empty otherwise, which is then to be emptied: it counts for nothing that the program
   adds it. Others stay.
4. A drop begins a new generation: nothing is queued, what is being computed does not count, and the
   vector is to be emptied.
4'. Whatever is to be emptied is empty before anything else is added to it.
5. After each of these the parent is told: generation, blocks added, blocks returned. What was said
   in an older generation counts for nothing.
6. A piece of the vector is given out if generation and number of added blocks are those asked for,
   and only while the program waits: nothing is queued and nothing is being computed. Otherwise it is
   refused, and the parent may ask again.
7. The rank leaves the round when it hears that it is over, and not before.

Parent, per round: for each rank its generation and the blocks granted in it; the free blocks; the
pieces of the sum that are formed.
0'. Who has not called is told to hold before others get its blocks. They are free once it answers
    that it will ask, or is found silent. If it has begun with them all the same it is dropped. Who
    asks although it need not have is granted its blocks once more.
8. A free block is granted to a rank that holds it and has acknowledged its generation.
9. What is returned is free. A silent rank is dropped: all that it was granted is free.
10. A rank is *sealed* when every block in its ledger is added. That it has nothing to do is not
    enough: a grant may be on its way.
11. A piece is formed when nothing is free and every rank with blocks in its ledger is sealed, from
    their pieces, each as it was when its rank had just these blocks. Pieces that were formed before
    a rank was dropped stay: each is a whole sum by itself.
12. The round is over when every piece is formed.

Where programs do not wait, but hand their vectors over at the end (``lends=False``, blocks on the
host), an engine cannot have one emptied either, but what was recalled or dropped while it was
computed is not added. Then:
3''. A recalled block that is queued or being computed is returned.
4''. Who is dropped is out for the round: nothing is granted to it any more.
13. When nothing is free and every rank with blocks in its ledger is sealed, the parent ends the
    round's computation. It grants nothing after that, and a program leaves its loop only then.
6''. A piece is given out once the program has handed over its vector, after its loop.
9''. A rank that is dropped after the end of the computation fails the round, on all ranks.

With a deadline after which the sum may be of a part of the batch (``approximates``), the parent may
*close* the round at any moment. From then on:
14. Nothing is granted. Who has not called has no blocks any more; if it has begun with its own all
    the same, it is dropped (0'). All that is not added is recalled.
15. The parent may drop anybody whose vector does not come, also after the end of the computation,
    which then fails nothing.
16. A piece is formed when every rank with blocks in its ledger is sealed, although blocks are free:
    these are missing.
17. All pieces are of the same blocks: where a rank is dropped the sum begins anew.

Ranks are processes: they stop and wake up, or die, at any moment, and what they have sent may still
arrive. Messages of one rank to another keep their order; but a vector may be read before what was
said to its rank earlier is heard, or after what was said later. The root is one of the ranks, and its
process neither stops nor dies. Whether the parent finds a rank silent rightly is up to chance.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

Block = int


@dataclasses.dataclass(frozen=True)
class Rules:
    """Which of the rules hold.

    Attributes:
        refuse: who has begun with its own blocks when they were free is dropped (0').
        count_added: a rank is not sealed just because it has nothing to do (10).
        generations: what was said or held before a drop counts for nothing (5, 6).
        versions: pieces are used only as of the blocks in the ledger (6, 11).
        keep_added: a recalled block that is added is not returned (3).
        keep_running: nor is one that is computed while others are in the vector (3).
        drop_running: nor does one count that was taken back while it was computed (3, 4).
        empty: what is in the vector of one that was dropped goes (4').
        wait: vectors are lent only while programs wait (6).
        stay: ranks leave only when every piece is formed (7, 12).
        out: a rank whose vector cannot be emptied is granted nothing after a drop (4'').
        hold: programs go on until the computation ends (13).
        grant_nothing: nothing is granted once the round is closed (14).
        anew: the sum is begun anew where a rank is dropped from a closed round (17).
    """

    refuse: bool = True
    count_added: bool = True
    generations: bool = True
    versions: bool = True
    keep_added: bool = True
    keep_running: bool = True
    drop_running: bool = True
    empty: bool = True
    wait: bool = True
    stay: bool = True
    out: bool = True
    hold: bool = True
    grant_nothing: bool = True
    anew: bool = True


class Rank(NamedTuple):
    """What a rank knows of the round."""

    generation: int = 0
    queue: tuple[Block, ...] = ()
    computes: Block | None = None
    unwanted: bool = False  # what it computes does not count
    vector: tuple[Block, ...] = ()  # what was added, in order
    added: int = 0  # so many blocks count
    stale: bool = False  # the vector is to be emptied
    left: bool = False
    ends: bool = False  # it has heard that nothing more is to be computed,
    handed_over: bool = False  # and its program that owns the vector has handed it over
    called: bool = True
    asks: bool = False  # before it begins with its own blocks


class Account(NamedTuple):
    """What the parent knows of a rank."""

    generation: int = 0
    known: int = 0  # generation that the rank has acknowledged
    blocks: frozenset[Block] = frozenset()  # granted and not returned
    added: int = 0  # so many of them
    recalled: frozenset[Block] = frozenset()
    out: bool = False
    called: bool = True
    held: bool = False  # it was told to hold


class Piece(NamedTuple):
    """Of a rank's vector, as it was given out."""

    generation: int
    version: int
    holds: tuple[Block, ...]


class State(NamedTuple):
    ranks: tuple[Rank, ...]
    accounts: tuple[Account, ...]
    free: frozenset[Block]
    fetched: tuple[tuple[Piece | None, ...], ...]  # by rank and piece
    asked: frozenset[tuple[int, int, int, int]]  # rank, piece, generation, version
    reads: frozenset[tuple[int, int, int, int]]  # of these, on their way
    formed: tuple[tuple[Block, ...] | None, ...]  # what each piece of the sum is of
    down: tuple[tuple[tuple, ...], ...]  # messages on their way, by rank
    up: tuple[tuple[tuple, ...], ...]
    stopped: frozenset[int] = frozenset()
    dead: frozenset[int] = frozenset()
    recalls: int = 0  # to come
    faults: tuple[int, int, int] = (
        0,
        0,
        0,
    )  # stops, deaths and wrong suspicions to come

    misread: bool = False  # a vector was given out that was being added to
    ending: bool = False  # the parent has ended the computation
    failed: bool = False
    closed: bool = False  # the deadline is over

    @property
    def over(self) -> bool:
        return self.failed or all(piece is not None for piece in self.formed)


def replaced(items: tuple, index: int, item: object) -> tuple:
    return (*items[:index], item, *items[index + 1 :])


@dataclasses.dataclass(frozen=True)
class Model:
    """A family.

    Attributes:
        holders: the ranks that hold each block's data; rank 0 is the root. Block ``b`` is
            rank ``b % ranks``'s own, if that holds it.
        ranks: how many there are.
        pieces: of every vector.
        lends: whether programs lend their vectors while they wait; or hand them over in
            the end.
        approximates: whether the sum may be of a part of the batch after a deadline.
    """

    holders: tuple[frozenset[int], ...]
    ranks: int
    pieces: int = 1
    rules: Rules = Rules()
    lends: bool = True
    approximates: bool = False

    def own(self, r: int) -> tuple[Block, ...]:
        blocks = range(r, len(self.holders), self.ranks)
        return tuple(b for b in blocks if r in self.holders[b])

    def start(
        self,
        recalls: int = 1,
        stops: int = 0,
        deaths: int = 0,
        suspicions: int = 0,
        expected: tuple[int, ...] | None = None,
        asks: tuple[int, ...] = (),
    ) -> State:
        """A round begins.

        Args:
            recalls, stops, deaths, suspicions: to come.
            expected: ranks of which the parent takes it that they begin with their own
                blocks; ``None``: all have called, and begun with none.
            asks: ranks that know that they are to ask first.
        """
        n = self.ranks
        if expected is None:
            ranks, accounts = (Rank(),) * n, (Account(),) * n
        else:
            ranks = tuple(Rank(called=False, asks=r in asks) for r in range(n))
            accounts = tuple(
                Account(
                    known=-1,
                    blocks=frozenset(self.own(r) if r in expected else ()),
                    called=False,
                )
                for r in range(n)
            )
        granted = frozenset().union(*(account.blocks for account in accounts))
        return State(
            ranks=ranks,
            accounts=accounts,
            free=frozenset(range(len(self.holders))) - granted,
            fetched=((None,) * self.pieces,) * n,
            asked=frozenset(),
            reads=frozenset(),
            formed=(None,) * self.pieces,
            down=((),) * n,
            up=((),) * n,
            recalls=recalls,
            faults=(stops, deaths, suspicions),
        )

    # What can happen next.

    def moves(self, state: State) -> Iterator[tuple[str, State]]:
        """All that may happen but faults, with what comes of it."""
        for r in range(self.ranks):
            if state.up[r]:
                message, *rest = state.up[r]
                heard = state._replace(up=replaced(state.up, r, tuple(rest)))
                yield f"parent hears {r}: {message}", self.heard(heard, r, message)
            if r in state.dead or r in state.stopped:
                continue
            if state.down[r]:
                message, *rest = state.down[r]
                told = state._replace(down=replaced(state.down, r, tuple(rest)))
                yield f"{r} hears {message}", self.told(told, r, message)
            rank = state.ranks[r]
            if rank.left:
                continue
            if not rank.called:
                yield f"{r} calls", self.calls(state, r)
                continue
            for read in sorted(state.reads):
                if read[0] == r and (self.lends or rank.handed_over):
                    yield f"{r} is asked {read[1:]}", self.read(state, read)
            if rank.computes is not None:
                yield f"{r} has computed {rank.computes}", self.computed(state, r)
            elif self._leaves_loop(rank):
                handed_over = rank._replace(handed_over=True)
                yield (
                    f"{r} hands over its vector",
                    state._replace(ranks=replaced(state.ranks, r, handed_over)),
                )
            elif rank.queue and not rank.handed_over:
                taken = rank._replace(computes=rank.queue[0], queue=rank.queue[1:])
                if rank.stale:
                    taken = taken._replace(vector=(), stale=False)
                yield (
                    f"{r} computes {rank.queue[0]}",
                    state._replace(ranks=replaced(state.ranks, r, taken)),
                )
        if not state.over:
            yield from self.decisions(state)

    def _leaves_loop(self, rank: Rank) -> bool:
        if self.lends or rank.handed_over:
            return False
        return rank.ends or bool(not self.rules.hold and not rank.queue and rank.vector)

    def faults(self, state: State) -> Iterator[tuple[str, State]]:
        stops, deaths, suspicions = state.faults
        for r in range(1, self.ranks):
            if r in state.dead:
                continue
            if r in state.stopped:
                yield f"{r} wakes up", state._replace(stopped=state.stopped - {r})
            elif stops:
                yield (
                    f"{r} stops",
                    state._replace(
                        stopped=state.stopped | {r},
                        faults=(stops - 1, deaths, suspicions),
                    ),
                )
            if deaths:
                dead = state._replace(
                    dead=state.dead | {r},
                    stopped=state.stopped - {r},
                    faults=(stops, deaths - 1, suspicions),
                    down=replaced(state.down, r, ()),
                )
                yield f"{r} dies", dead
                if state.up[r]:  # what was on its way may be lost, from some message on
                    yield (
                        f"{r} dies, and its messages are lost",
                        dead._replace(up=replaced(dead.up, r, ())),
                    )
            if (
                suspicions
                and r not in state.stopped
                and not state.over
                and state.accounts[r].blocks
                and (state.accounts[r].called or state.accounts[r].held)
            ):
                yield (
                    f"parent gives up {r}, which is there",
                    self.given_up(state, r)._replace(
                        faults=(stops, deaths, suspicions - 1)
                    ),
                )

    # The rank.

    def calls(self, state: State, r: int) -> State:
        rank = state.ranks[r]._replace(called=True)
        if not rank.asks:
            rank = rank._replace(queue=self.own(r))
        state = state._replace(ranks=replaced(state.ranks, r, rank))
        return self.sends_up(state, r, ("calls", 0, not rank.asks))

    def told(self, state: State, r: int, message: tuple) -> State:
        rank = state.ranks[r]
        kind, generation, *rest = message
        if kind == "over":
            return state._replace(
                ranks=replaced(state.ranks, r, rank._replace(left=True))
            )
        if rank.left:
            return state
        if kind == "hold":
            if rank.called:
                return state
            rank = rank._replace(asks=True)
            state = state._replace(ranks=replaced(state.ranks, r, rank))
            return self.sends_up(state, r, ("will ask", 0))
        if kind == "end":
            return state._replace(
                ranks=replaced(state.ranks, r, rank._replace(ends=True))
            )
        if kind == "drop" and not self.lends and self.rules.out:
            out = rank._replace(
                generation=generation, queue=(), unwanted=rank.computes is not None
            )
            return self.tells(state, r, out._replace(ends=True))
        if kind == "drop":
            rank = rank._replace(
                generation=generation,
                queue=(),
                unwanted=rank.computes is not None and self.rules.drop_running,
                added=0,
                stale=self.lends and self.rules.empty,
            )
            return self.tells(state, r, rank)
        if kind == "grant":
            (block,) = rest
            rank = rank._replace(queue=(*rank.queue, block))
            return self.tells(state, r, rank)
        assert kind == "recall"
        (block,) = rest
        if block in rank.queue:
            rank = rank._replace(queue=tuple(b for b in rank.queue if b != block))
        elif self.returns_running(rank, block):
            rank = rank._replace(unwanted=self.rules.drop_running)
        elif self.rules.keep_added or block not in rank.vector:
            return self.tells(state, r, rank, kept=block)
        return self.tells(state, r, rank, returned=block)

    def read(self, state: State, read: tuple[int, int, int, int]) -> State:
        r, piece, generation, version = read
        rank = state.ranks[r]
        state = state._replace(reads=state.reads - {read})
        waits = rank.computes is None and not rank.queue
        fits = generation == rank.generation or not self.rules.generations
        fits &= version == rank.added or not self.rules.versions
        if not (fits and (waits or not self.rules.wait)):
            return self.sends_up(state, r, ("refused", generation, version, piece))
        its = Piece(generation, rank.added, rank.vector)
        if self.lends and rank.computes is not None:
            state = state._replace(misread=True)
        return self.sends_up(state, r, ("piece", generation, piece, its))

    def returns_running(self, rank: Rank, block: Block) -> bool:
        if rank.computes != block or rank.unwanted:
            return False
        return not (self.lends and rank.added and self.rules.keep_running)

    def computed(self, state: State, r: int) -> State:
        rank = state.ranks[r]
        if rank.unwanted and not self.lends:
            vector = rank.vector
        else:
            vector = (*rank.vector, rank.computes)
        rank = rank._replace(
            computes=None,
            unwanted=False,
            vector=vector,
            added=rank.added + (not rank.unwanted),
            stale=rank.stale or (rank.unwanted and self.lends and self.rules.empty),
        )
        return self.tells(state, r, rank)

    def tells(
        self,
        state: State,
        r: int,
        rank: Rank,
        returned: Block | None = None,
        kept: Block | None = None,
    ) -> State:
        idle = rank.computes is None and not rank.queue
        state = state._replace(ranks=replaced(state.ranks, r, rank))
        return self.sends_up(
            state,
            r,
            (
                "status",
                rank.generation,
                rank.added,
                returned,
                kept,
                idle,
            ),
        )

    @staticmethod
    def sends_up(state: State, r: int, message: tuple) -> State:
        return state._replace(up=replaced(state.up, r, (*state.up[r], message)))

    # The parent.

    @staticmethod
    def sends_down(state: State, r: int, message: tuple) -> State:
        if r in state.dead:
            return state
        return state._replace(down=replaced(state.down, r, (*state.down[r], message)))

    def heard(self, state: State, r: int, message: tuple) -> State:
        account = state.accounts[r]
        kind, generation, *rest = message
        if kind == "calls":
            return self.called(state, r, begins=rest[0])
        if kind == "will ask":
            return state if account.called else self.freed(state, r)
        if generation != account.generation and self.rules.generations:
            return state
        if kind == "piece":
            piece, its = rest
            row = replaced(state.fetched[r], piece, its)
            asked = frozenset(a for a in state.asked if a[:2] != (r, piece))
            return state._replace(fetched=replaced(state.fetched, r, row), asked=asked)
        if kind == "refused":
            version, piece = rest
            asked = state.asked - {(r, piece, generation, version)}
            return state._replace(asked=asked)
        added, returned, kept, idle = rest
        if not self.rules.count_added and idle:
            added = len(account.blocks)
        free, blocks, recalled = state.free, account.blocks, account.recalled
        if returned in blocks:
            blocks, free = blocks - {returned}, free | {returned}
        account = account._replace(
            known=account.generation,
            added=added,
            blocks=blocks,
            recalled=recalled - {returned, kept},
        )
        return state._replace(accounts=replaced(state.accounts, r, account), free=free)

    def called(self, state: State, r: int, *, begins: bool) -> State:
        account = state.accounts[r]
        called = account._replace(called=True, known=account.generation)
        state = state._replace(accounts=replaced(state.accounts, r, called))
        if begins and account.blocks != frozenset(self.own(r)) and self.rules.refuse:
            return self.dropped(state, r)
        if not begins:
            for block in sorted(account.blocks):
                state = self.sends_down(state, r, ("grant", account.generation, block))
        return state

    @staticmethod
    def freed(state: State, r: int) -> State:
        account = state.accounts[r]
        free = state.free | account.blocks
        account = account._replace(blocks=frozenset())
        return state._replace(accounts=replaced(state.accounts, r, account), free=free)

    def sealed(self, account: Account) -> bool:
        return account.added == len(account.blocks)

    def given_up(self, state: State, r: int) -> State:
        called = state.accounts[r].called
        return self.dropped(state, r) if called else self.freed(state, r)

    def dropped(self, state: State, r: int) -> State:
        account = state.accounts[r]
        generation = account.generation + 1
        dropped = Account(generation, account.known)
        if not self.lends:
            dropped = dropped._replace(out=self.rules.out)
            state = state._replace(failed=state.ending and not self.approximates)
        if not self.rules.generations:
            dropped = dropped._replace(known=generation)
        state = state._replace(
            accounts=replaced(state.accounts, r, dropped),
            free=state.free | account.blocks,
        )
        if self.approximates and (state.closed or state.ending):
            state = state._replace(closed=True)
            if self.rules.anew:
                state = state._replace(formed=(None,) * self.pieces)
        return self.sends_down(state, r, ("drop", generation))

    def closed(self, state: State) -> State:
        """The deadline is over."""
        for r, account in enumerate(state.accounts):
            if not account.called:
                state = self.freed(state, r)
                continue
            unanswered = account.blocks - account.recalled
            if self.sealed(account):
                continue
            recalled = account._replace(recalled=account.blocks)
            state = state._replace(accounts=replaced(state.accounts, r, recalled))
            for block in sorted(unanswered):
                recall = ("recall", account.generation, block)
                state = self.sends_down(state, r, recall)
        return state._replace(closed=True)

    def decisions(self, state: State) -> Iterator[tuple[str, State]]:
        """All that the parent may do."""
        idle = False
        grants = not (state.closed and self.rules.grant_nothing)
        if self.approximates and not (state.closed or state.ending):
            yield "parent closes the round", self.closed(state)
        for r, account in enumerate(state.accounts):
            if not account.called and account.blocks and not account.held:
                told = account._replace(held=True)
                after = state._replace(accounts=replaced(state.accounts, r, told))
                yield f"parent holds {r}", self.sends_down(after, r, ("hold", 0))
            here = account.known == account.generation and not account.out
            idle |= here and self.sealed(account)
            few = len(account.blocks) - account.added < 2
            if here and few and grants and not state.ending:
                for block in sorted(state.free):
                    if r in self.holders[block]:
                        granted = account._replace(blocks=account.blocks | {block})
                        after = state._replace(
                            accounts=replaced(state.accounts, r, granted),
                            free=state.free - {block},
                        )
                        yield (
                            f"parent grants {block} to {r}",
                            self.sends_down(
                                after, r, ("grant", account.generation, block)
                            ),
                        )
            silent = r in state.stopped or r in state.dead or state.closed
            if silent and account.blocks and (account.called or account.held):
                yield f"parent gives up {r}", self.given_up(state, r)
        if state.recalls and not state.free and idle and not state.closed:
            for r, account in enumerate(state.accounts):
                if account.added == len(account.blocks) or account.recalled:
                    continue
                if not account.called:
                    continue
                for block in sorted(account.blocks):
                    recalled = account._replace(recalled=account.recalled | {block})
                    after = state._replace(
                        accounts=replaced(state.accounts, r, recalled),
                        recalls=state.recalls - 1,
                    )
                    yield (
                        f"parent recalls {block} from {r}",
                        self.sends_down(
                            after, r, ("recall", account.generation, block)
                        ),
                    )
        yield from self.gathered(state)

    def gathered(self, state: State) -> Iterator[tuple[str, State]]:
        chosen = [r for r, account in enumerate(state.accounts) if account.blocks]
        if state.free and not state.closed:
            return
        if not all(self.sealed(state.accounts[r]) for r in chosen):
            return
        if not (self.lends or state.ending):
            state = state._replace(ending=True)
            for r, account in enumerate(state.accounts):
                if not account.out:
                    state = self.sends_down(state, r, ("end", account.generation))
            yield "parent ends the computation", state
            return
        if not self.rules.stay:
            for r in range(self.ranks):
                if not state.ranks[r].left and ("over", 0) not in state.down[r]:
                    state = self.sends_down(state, r, ("over", 0))
        for piece in range(self.pieces):
            if state.formed[piece] is not None:
                continue
            inputs = []
            for r in chosen:
                account = state.accounts[r]
                version = len(account.blocks)
                its = state.fetched[r][piece]
                wanted = account.generation, version
                if its and (not self.rules.versions or its[:2] == wanted):
                    inputs.append(its.holds)
                elif (read := (r, piece, *wanted)) not in state.asked:
                    asked = state._replace(
                        asked=state.asked | {read}, reads=state.reads | {read}
                    )
                    yield f"parent asks {r} for piece {piece}", asked
            if len(inputs) == len(chosen):
                holds = tuple(sorted(block for its in inputs for block in its))
                after = state._replace(formed=replaced(state.formed, piece, holds))
                if after.over and self.rules.stay:
                    for r in range(self.ranks):
                        after = self.sends_down(after, r, ("over", 0))
                yield f"parent forms piece {piece}", after


def wrong(model: Model, state: State) -> str:
    """What is wrong with what was given out or formed; empty if nothing is."""
    if state.misread:
        return "a vector was given out while its program added to it"
    batch = tuple(range(len(model.holders)))
    formed = [holds for holds in state.formed if holds is not None]
    for piece, holds in enumerate(state.formed):
        if holds is None or holds == batch:
            continue
        twice = len(set(holds)) < len(holds)
        if not state.closed or twice:
            return f"piece {piece} of the sum is of the blocks {list(holds)}"
    if state.closed and len(set(formed)) > 1:
        return f"the pieces of the sum are of different blocks, {formed}"
    return ""
