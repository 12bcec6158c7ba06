"""A model of work sharing in one family. It shows which rules keep the sum exact, whatever the order of messages.

The batch is cut into *blocks*. In a round each block is granted to one rank that holds
its data. That rank's program adds the block's gradient to the rank's vector. The parent
keeps a *ledger* of grants. It takes the vectors, piece by piece, once they hold every
block exactly once. It can take back blocks that a rank has not added yet (*recall*),
and all blocks of a silent rank (*drop*).

The vectors are *lent*: they belong to the programs, and other ranks may read them only
while their programs wait for the next block. A program adds to its vector or empties
it; it cannot subtract a block.

`Rules` switches off single rules, so that tests can show why each rule is needed.

Rank, per round: a generation, a queue of blocks, the block that its program computes,
the vector, and the number of blocks of this generation in it.
0. The queue of a rank that calls holds its own blocks. A rank that must *ask* starts
   with an empty queue and says so. A rank that is told to *hold* before it calls must
   ask, and says so too.
1. Granted blocks go to the queue.
2. The program takes blocks from the queue. It adds each block once computed, even if
   the grant was revoked meanwhile. Then it asks for the next block, and waits if there
   is none.
3. A recalled block is returned if it is queued. If it is being computed, it is returned
   only if the vector holds nothing else. Then the program's addition is ignored, and
   the vector must be emptied. Other blocks stay.
4. A drop begins a new generation: the queue is empty, the block being computed does not
   count, and the vector must be emptied.
4'. A vector that must be emptied is empty before anything else is added.
5. After each of these the rank reports its generation, and the blocks added and
   returned. The parent ignores reports of older generations.
6. A piece of the vector is given out if the generation and the number of added blocks
   match the request. The program must be waiting: the queue is empty and no block is
   being computed. Otherwise the rank refuses, and the parent may ask again.
7. The rank leaves the round when it hears that the round is over, and not before.

Parent, per round: the generation and the granted blocks of each rank, the free blocks,
and the pieces of the sum that are formed.
0'. A rank that has not called is told to hold before other ranks get its blocks. The
   blocks are free once the rank answers that it will ask, or is found silent. A rank
   that has begun with its blocks nevertheless is dropped. A rank that asks although it
   need not is granted its blocks again.
8. A free block is granted to a rank that holds it and has acknowledged its generation.
9. Returned blocks are free. A silent rank is dropped: all its blocks are free.
10. A rank is *sealed* when every block in its ledger is added. An idle rank is not
   necessarily sealed: a grant may be on its way.
11. A piece is formed when no block is free and every rank with blocks in its ledger is
   sealed. It is the sum of these ranks' pieces, each from the version of the vector
   that holds just the blocks in the ledger.
   Pieces formed before a drop stay: each is a complete sum.
12. The round is over when every piece is formed.

Programs whose blocks are on the host do not wait, but hand their vectors over at the
end (``lends=False``). Then an engine cannot have a vector emptied, but it does not add
blocks that were recalled or dropped while they were computed. Then:
3''. A recalled block that is queued or being computed is returned.
4''. A dropped rank is out for the round: it is granted nothing more.
13. When no block is free and every rank with blocks in its ledger is sealed, the parent
   ends the round's computation. It grants nothing after that, and only then do programs
   leave their loops.
6''. A piece is given out once the program has handed over its vector, after its loop.
9''. If a rank is dropped after the end of the computation, the round fails on all
   ranks.

If the sum may lack a part of the batch after a deadline (``approximates``), the parent
may *close* the round at any moment. From then on:
14. Nothing is granted. A rank that has not called has no blocks any more; if it has
   begun with its own blocks nevertheless, it is dropped (0'). Blocks not yet added are
   recalled.
15. The parent may drop any rank whose vector does not come, even after the end of the
   computation. The round does not fail then.
16. A piece is formed when every rank with blocks in its ledger is sealed, even if
   blocks are free: the sum lacks the free blocks.
17. All pieces contain the same blocks: after a drop the sum begins again.

Ranks are processes: they stop and wake up, or die, at any moment, and what they have
sent may still arrive. Messages between two ranks keep their order. A vector may be read
before its rank has handled earlier messages, or after later ones. The root is one of
the ranks, and its process neither stops nor dies. The parent may wrongly find a rank
silent at any moment.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

Block = int


@dataclasses.dataclass(frozen=True)
class Rules:
    """The rules in force, by their numbers above.

    Attributes:
        refuse: a rank that has begun with its own blocks when they were free is dropped
            (0').
        count_added: a rank is not sealed just because it has nothing to do (10).
        generations: reports and pieces from before a drop are ignored (5, 6).
        versions: a piece is used only if it holds the blocks in the ledger (6, 11).
        keep_added: a recalled block that is already added is not returned (3).
        keep_running: a recalled block that is being computed while other blocks are in the vector is not returned (3).
        drop_running: a block taken back while it is computed does not count (3, 4).
        empty: the vector of a dropped rank is emptied (4').
        wait: vectors are lent only while programs wait (6).
        stay: ranks leave only when every piece is formed (7, 12).
        out: a rank whose vector cannot be emptied is granted nothing after a drop (4'').
        hold: programs continue until the computation ends (13).
        grant_nothing: nothing is granted once the round is closed (14).
        restart: after a drop from a closed round the sum begins again (17).
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
    restart: bool = True


class Rank(NamedTuple):
    """A rank's knowledge of the round."""

    generation: int = 0
    queue: tuple[Block, ...] = ()
    computes: Block | None = None
    unwanted: bool = False  # whether the block that it computes does not count
    vector: tuple[Block, ...] = ()  # the added blocks, in order
    added: int = 0  # number of blocks that count
    stale: bool = False  # whether the vector must be emptied
    left: bool = False
    ends: bool = False  # the rank knows that the computation has ended
    handed_over: bool = False  # the rank's program has handed the vector over
    called: bool = True
    asks: bool = False  # whether the rank asks before it begins with its own blocks


class Account(NamedTuple):
    """The parent's knowledge of a rank."""

    generation: int = 0
    known: int = 0  # generation that the rank has acknowledged
    blocks: frozenset[Block] = frozenset()  # granted and not returned
    added: int = 0  # number of granted blocks that are added
    recalled: frozenset[Block] = frozenset()
    out: bool = False
    called: bool = True
    held: bool = False  # whether the rank was told to hold


class Piece(NamedTuple):
    """A piece of a rank's vector, as given out."""

    generation: int
    version: int
    holds: tuple[Block, ...]


class State(NamedTuple):
    ranks: tuple[Rank, ...]
    accounts: tuple[Account, ...]
    free: frozenset[Block]
    fetched: tuple[tuple[Piece | None, ...], ...]  # by rank and piece
    asked: frozenset[tuple[int, int, int, int]]  # rank, piece, generation, version
    # reads that are on their way for these requests
    reads: frozenset[tuple[int, int, int, int]]
    formed: tuple[tuple[Block, ...] | None, ...]  # the blocks in each piece of the sum
    down: tuple[tuple[tuple, ...], ...]  # messages on their way, by rank
    up: tuple[tuple[tuple, ...], ...]
    stopped: frozenset[int] = frozenset()
    dead: frozenset[int] = frozenset()
    recalls: int = 0  # recalls to come
    faults: tuple[int, int, int] = (
        0,
        0,
        0,
    )  # stops, deaths and wrong suspicions to come

    misread: bool = False  # whether a vector was given out during an addition
    ending: bool = False  # whether the parent has ended the computation
    failed: bool = False
    closed: bool = False  # whether the deadline is over

    @property
    def over(self) -> bool:
        return self.failed or all(piece is not None for piece in self.formed)


def replaced(items: tuple, index: int, item: object) -> tuple:
    return (*items[:index], item, *items[index + 1 :])


@dataclasses.dataclass(frozen=True)
class Model:
    """The model of a family.

    Attributes:
        holders: the ranks that hold each block's data; rank 0 is the root. Block ``b``
            belongs to rank ``b % ranks``, if that rank holds it.
        ranks: number of ranks.
        pieces: number of pieces of a vector.
        lends: whether programs lend their vectors while they wait, or hand them over at
            the end.
        approximates: whether the sum may lack a part of the batch after a deadline.
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
        """Return the state at the beginning of a round.

        Args:
            recalls, stops, deaths, suspicions: how many may come.
            expected: ranks that the parent expects to begin with their own blocks;
                ``None``: all ranks have called, and have begun with no block.
            asks: ranks that know that they must ask first.
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
        """Return all possible moves except faults, with the states after them."""
        for r in range(self.ranks):
            if state.up[r]:
                message, *rest = state.up[r]
                heard = state._replace(up=replaced(state.up, r, tuple(rest)))
                yield f"parent hears {r}: {message}", self.heard(heard, r, message)
            if r in state.dead or r in state.stopped:
                continue
            if state.down[r]:
                message, *rest = state.down[r]
                after = state._replace(down=replaced(state.down, r, tuple(rest)))
                yield f"{r} hears {message}", self.told(after, r, message)
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
                if state.up[r]:  # the last messages on their way may be lost
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
        lent = Piece(generation, rank.added, rank.vector)
        if self.lends and rank.computes is not None:
            state = state._replace(misread=True)
        return self.sends_up(state, r, ("piece", generation, piece, lent))

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
            piece, copy = rest
            row = replaced(state.fetched[r], piece, copy)
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
            if self.rules.restart:
                state = state._replace(formed=(None,) * self.pieces)
        return self.sends_down(state, r, ("drop", generation))

    def closed(self, state: State) -> State:
        """Return the state after the deadline."""
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
        """Return all moves of the parent."""
        idle = False
        grants = not (state.closed and self.rules.grant_nothing)
        if self.approximates and not (state.closed or state.ending):
            yield "parent closes the round", self.closed(state)
        for r, account in enumerate(state.accounts):
            if not account.called and account.blocks and not account.held:
                holding = account._replace(held=True)
                after = state._replace(accounts=replaced(state.accounts, r, holding))
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
                fetched = state.fetched[r][piece]
                wanted = account.generation, version
                if fetched and (not self.rules.versions or fetched[:2] == wanted):
                    inputs.append(fetched.holds)
                elif (read := (r, piece, *wanted)) not in state.asked:
                    asked = state._replace(
                        asked=state.asked | {read}, reads=state.reads | {read}
                    )
                    yield f"parent asks {r} for piece {piece}", asked
            if len(inputs) == len(chosen):
                holds = tuple(sorted(block for blocks in inputs for block in blocks))
                after = state._replace(formed=replaced(state.formed, piece, holds))
                if after.over and self.rules.stay:
                    for r in range(self.ranks):
                        after = self.sends_down(after, r, ("over", 0))
                yield f"parent forms piece {piece}", after


def wrong(model: Model, state: State) -> str:
    """Return what is wrong with the pieces given out or formed; empty if nothing is wrong."""
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
