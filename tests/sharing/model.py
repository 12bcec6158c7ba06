"""A model of work sharing in one family: which messages, in whatever order, keep the sum exact.

The batch is cut into *blocks*. In a round each block is granted to one rank that holds its data,
and that rank adds its gradient to a vector of its own. The parent keeps a *ledger* of who was
granted what, and takes the ranks' vectors, piece by piece, once they hold every block exactly once.
It can take back what a rank has not added yet (*recall*), and all that a silent rank was granted
(*condemn*).

The rules, which `Rules` switches off one by one so that tests can show what each is for:

Rank, per round: a generation, a queue of blocks, the block that its program computes, the vector.
1. What is granted goes to the queue.
2. The program takes blocks from the queue and adds them when they are computed.
3. A recalled block that is queued or being computed is returned, and not added when it is done. One
   that is added stays.
4. A drop begins a new generation: nothing is queued, nothing is in the vector, and what is being
   computed is not added.
5. After each of these the parent is told: generation, blocks added, blocks returned. What was said
   in an older generation counts for nothing.
6. A piece of the vector is given out if generation and number of added blocks are those asked for.
7. The rank leaves the round when it hears that it is over, and not before.

Parent, per round: for each rank its generation and the blocks granted in it; the free blocks; the
pieces of the sum that are formed.
8. A free block is granted to a rank that holds it and has acknowledged its generation.
9. What is returned is free. A silent rank is dropped: all that it was granted is free.
10. A rank is *sealed* when every block in its ledger is added. That it has nothing to do is not
    enough: a grant may be on its way.
11. A piece is formed when nothing is free and every rank with blocks in its ledger is sealed, from
    their pieces, each as it was when its rank had just these blocks. Pieces that were formed before
    a rank was dropped stay: each is a whole sum by itself.
12. The round is over when every piece is formed.

Where programs own the vectors (``engine_owns=False``, blocks on the host) an engine can neither
empty one nor give it out while its program goes on. Then:
4'. Who is dropped is out for the round: nothing is granted to it any more.
13. When nothing is free and every rank with blocks in its ledger is sealed, the parent ends the
    round's computation. It grants nothing after that, and a program leaves its loop only then.
6'. A piece is given out once the program has handed over its vector, after its loop.
9'. A rank that is dropped after the end of the computation fails the round, on all ranks.

Ranks are processes: they stop and wake up, or die, at any moment, and what they have sent may still
arrive. Messages of one rank to another keep their order. The root is one of the ranks, and its
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
        count_added: a rank is not sealed just because it has nothing to do (10).
        generations: what was said or held before a drop counts for nothing (5, 6).
        versions: pieces are used only as of the blocks in the ledger (6, 11).
        keep_added: a recalled block that is added is not returned (3).
        drop_running: nor is one added that was recalled while it was computed (3, 4).
        stay: ranks leave only when every piece is formed (7, 12).
        out: a rank whose vector cannot be emptied is granted nothing after a drop (4').
        hold: programs go on until the computation ends (13).
    """

    count_added: bool = True
    generations: bool = True
    versions: bool = True
    keep_added: bool = True
    drop_running: bool = True
    stay: bool = True
    out: bool = True
    hold: bool = True


class Rank(NamedTuple):
    """What a rank knows of the round."""

    generation: int = 0
    queue: tuple[Block, ...] = ()
    computes: Block | None = None
    unwanted: bool = False  # what it computes is not to be added
    vector: tuple[Block, ...] = ()  # what was added, in order
    left: bool = False
    ends: bool = False  # it has heard that nothing more is to be computed,
    handed_over: bool = False  # and its program that owns the vector has handed it over


class Account(NamedTuple):
    """What the parent knows of a rank."""

    generation: int = 0
    known: int = 0  # generation that the rank has acknowledged
    blocks: frozenset[Block] = frozenset()  # granted and not returned
    added: int = 0  # so many of them
    recalled: frozenset[Block] = frozenset()
    out: bool = False


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

    ending: bool = False  # the parent has ended the computation
    failed: bool = False

    @property
    def over(self) -> bool:
        return self.failed or all(piece is not None for piece in self.formed)


def replaced(items: tuple, index: int, item: object) -> tuple:
    return (*items[:index], item, *items[index + 1 :])


@dataclasses.dataclass(frozen=True)
class Model:
    """A family.

    Attributes:
        holders: the ranks that hold each block's data; rank 0 is the root.
        ranks: how many there are.
        pieces: of every vector.
        engine_owns: the vectors; or the ranks' programs do.
    """

    holders: tuple[frozenset[int], ...]
    ranks: int
    pieces: int = 1
    rules: Rules = Rules()
    engine_owns: bool = True

    def start(
        self, recalls: int = 1, stops: int = 0, deaths: int = 0, suspicions: int = 0
    ) -> State:
        n = self.ranks
        return State(
            ranks=(Rank(),) * n,
            accounts=(Account(),) * n,
            free=frozenset(range(len(self.holders))),
            fetched=((None,) * self.pieces,) * n,
            asked=frozenset(),
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
                yield (
                    f"{r} computes {rank.queue[0]}",
                    state._replace(ranks=replaced(state.ranks, r, taken)),
                )
        if not state.over:
            yield from self.decisions(state)

    def _leaves_loop(self, rank: Rank) -> bool:
        if self.engine_owns or rank.handed_over:
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
            ):
                yield (
                    f"parent gives up {r}, which is there",
                    self.dropped(state, r)._replace(
                        faults=(stops, deaths, suspicions - 1)
                    ),
                )

    # The rank.

    def told(self, state: State, r: int, message: tuple) -> State:
        rank = state.ranks[r]
        kind, generation, *rest = message
        if kind == "over":
            return state._replace(
                ranks=replaced(state.ranks, r, rank._replace(left=True))
            )
        if rank.left:
            return state
        if kind == "end":
            return state._replace(
                ranks=replaced(state.ranks, r, rank._replace(ends=True))
            )
        if kind == "drop" and not self.engine_owns and self.rules.out:
            out = rank._replace(
                generation=generation, queue=(), unwanted=rank.computes is not None
            )
            return self.tells(state, r, out._replace(ends=True))
        if kind == "drop":
            rank = Rank(
                generation,
                computes=rank.computes,
                unwanted=rank.computes is not None and self.rules.drop_running,
                vector=()
                if self.rules.generations and self.engine_owns
                else rank.vector,
            )
            return self.tells(state, r, rank)
        if kind == "grant":
            (block,) = rest
            rank = rank._replace(queue=(*rank.queue, block))
            return self.tells(state, r, rank)
        if kind == "recall":
            (block,) = rest
            if block in rank.queue:
                rank = rank._replace(queue=tuple(b for b in rank.queue if b != block))
            elif rank.computes == block and not rank.unwanted:
                rank = rank._replace(unwanted=self.rules.drop_running)
            elif self.rules.keep_added or block not in rank.vector:
                return self.tells(state, r, rank, kept=block)
            return self.tells(state, r, rank, returned=block)
        assert kind == "fetch"
        version, piece = rest
        if generation != rank.generation and self.rules.generations:
            return state
        if not self.engine_owns and not rank.handed_over:
            again = message  # it is answered when the vector is there
            return state._replace(down=replaced(state.down, r, (*state.down[r], again)))
        if self.rules.versions and len(rank.vector) != version:
            return state
        its = Piece(generation, len(rank.vector), rank.vector)
        return self.sends_up(state, r, ("piece", generation, piece, its))

    def computed(self, state: State, r: int) -> State:
        rank = state.ranks[r]
        vector = rank.vector if rank.unwanted else (*rank.vector, rank.computes)
        rank = rank._replace(computes=None, unwanted=False, vector=vector)
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
                len(rank.vector),
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
        if generation != account.generation and self.rules.generations:
            return state
        if kind == "piece":
            piece, its = rest
            row = replaced(state.fetched[r], piece, its)
            asked = frozenset(a for a in state.asked if a[:2] != (r, piece))
            return state._replace(fetched=replaced(state.fetched, r, row), asked=asked)
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

    def sealed(self, account: Account) -> bool:
        return account.added == len(account.blocks)

    def dropped(self, state: State, r: int) -> State:
        account = state.accounts[r]
        generation = account.generation + 1
        dropped = Account(generation, account.known)
        if not self.engine_owns:
            dropped = dropped._replace(out=self.rules.out)
            state = state._replace(failed=state.ending)
        if not self.rules.generations:
            dropped = dropped._replace(known=generation)
        state = state._replace(
            accounts=replaced(state.accounts, r, dropped),
            free=state.free | account.blocks,
        )
        return self.sends_down(state, r, ("drop", generation))

    def decisions(self, state: State) -> Iterator[tuple[str, State]]:
        """All that the parent may do."""
        idle = False
        for r, account in enumerate(state.accounts):
            here = account.known == account.generation and not account.out
            idle |= here and self.sealed(account)
            few = len(account.blocks) - account.added < 2
            if here and few and not state.ending:
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
            if (r in state.stopped or r in state.dead) and account.blocks:
                yield f"parent gives up {r}", self.dropped(state, r)
        if state.recalls and not state.free and idle:
            for r, account in enumerate(state.accounts):
                if account.added == len(account.blocks) or account.recalled:
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
        if state.free or not all(self.sealed(state.accounts[r]) for r in chosen):
            return
        if not (self.engine_owns or state.ending):
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
                elif (r, piece, *wanted) not in state.asked:
                    asked = state._replace(asked=state.asked | {(r, piece, *wanted)})
                    yield (
                        f"parent asks {r} for piece {piece}",
                        self.sends_down(
                            asked, r, ("fetch", account.generation, version, piece)
                        ),
                    )
            if len(inputs) == len(chosen):
                holds = tuple(sorted(block for its in inputs for block in its))
                after = state._replace(formed=replaced(state.formed, piece, holds))
                if after.over and self.rules.stay:
                    for r in range(self.ranks):
                        after = self.sends_down(after, r, ("over", 0))
                yield f"parent forms piece {piece}", after


def wrong(model: Model, state: State) -> str:
    """What is wrong with the pieces that are formed; empty if nothing is."""
    batch = tuple(range(len(model.holders)))
    for piece, holds in enumerate(state.formed):
        if holds is not None and holds != batch:
            return f"piece {piece} of the sum is of the blocks {list(holds)}"
    return ""
