"""Rows that several devices share: states pass between the runs of tokens that each holds, and
convolutions see the tokens before a run.

A run maps the state before it to the state after it, S -> A S + N. Devices gather all maps at once,
and each composes those before its own runs: what they send does not grow with the sequence.

Shapes: B rows, S sequence, R devices, n tokens of a row on a device, T = B n, k runs of a row on a
device at most, r runs on this device (with padding, which is a run too), H heads, K key and V value
dimension, D channels, W width of a halo.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from .rows import Chunks, Rows

FAR = 2**62  # where runs begin that a device lacks


class SharedRows(Rows):
    """The documents of this device's tokens; for its kernels one begins with each run, too.

    Args:
        positions: (B, n), of this device's tokens.
        whole: (B, S), of all tokens; documents begin as in Rows.
        tokens: (B or 1, R, n) int64 on the host, the tokens that each device holds, ascending;
            then -1 for padding.
        rank: This device's number.
        gather: Returns all devices' tensors, (R, ...), differentiably.
    """

    def __init__(
        self,
        positions: Tensor,
        whole: Tensor,
        tokens: Tensor,
        rank: int,
        gather: Callable[[Tensor], Tensor],
    ) -> None:
        (rows, held), device, length = positions.shape, positions.device, whole.shape[1]
        # Padding is a run by itself, which no token follows.
        places = torch.where(tokens < 0, length + 1 + torch.arange(held), tokens)
        places = places.expand(rows, -1, -1)
        edges = F.pad(places.diff(dim=2) != 1, (1, 0), value=True)
        mine, edge = places[:, rank].to(device), edges[:, rank].to(device)
        since = Rows(whole).since.view(whole.shape)
        # Tokens of its document before each.
        before = since.gather(1, mine.clamp(max=length - 1)).masked_fill(mine > length, 0)
        super().__init__(positions, edge | ((before == 0) & (mine < length)))
        self.gather, self.packed = gather, True
        runs, bounds, before = Rows(positions, edge), self.bounds.long(), before.flatten()
        self._starts, self._ends = runs.bounds[:-1].long(), runs.bounds[1:].long() - 1  # (r,)
        self._before = before[self._starts]  # (r,), 0 where a document begins with a run
        self._number = edge.flatten().cumsum(0) - 1  # (T,), of a token's run
        self._find_runs(places, edges, edges & (tokens >= 0), rank)
        # (R k, B), whether a document goes on through a run, in the sequence's order.
        start = self._sorted.T.clamp(max=length).to(device)
        end = F.pad(start[1:], (0, 0, 0, 1), value=length) - 1
        self._passes = since.T.gather(0, end.clamp(min=0)) > end - start
        self._halos: dict[int, tuple[Tensor, Rows, Tensor, Tensor]] = {}
        # States enter and leave the first and the last document of each run alone.
        outer = torch.zeros(len(bounds) - 1, dtype=torch.bool, device=device)
        for edge_tokens in (self._starts, self._ends):
            outer[torch.searchsorted(bounds, edge_tokens, right=True) - 1] = True
        outer = outer.repeat_interleave(bounds.diff())
        self._outer, self._inner = outer.nonzero()[:, 0], (~outer).nonzero()[:, 0]
        self._back = torch.cat((self._outer, self._inner)).argsort()
        self.outer, self.inner = self._of(self._outer), self._of(self._inner)
        runs = Rows(positions, edge.flatten()[self._outer])
        size = int(runs.bounds.diff().max())
        # The outer documents' tokens by runs, t of them; which of these ends a run, and is of a
        # document that began before its run, (r,) and (t,).
        slots = self._number[self._outer] * size + runs.since
        self.runs = Chunks(size, slots, [True] * len(self._starts))
        self.ends, self.carries = runs.bounds[1:].long() - 1, before[self._outer] > runs.since
        outer_bounds = self.outer.bounds.long()
        # (r,), the last document of each run; whether a document goes on from the run before.
        self.last = torch.searchsorted(outer_bounds, self.ends, right=True) - 1
        self.documents_carry = self.carries[outer_bounds[:-1]]

    def _of(self, tokens: Tensor) -> Rows:
        """Return the rows of some documents' tokens, as one row."""
        begins = torch.zeros_like(self.since, dtype=torch.bool)
        begins[self.bounds[:-1].long()] = True
        return Rows(begins[None, tokens], begins[None, tokens])

    def computed(
        self, given: tuple[Tensor, ...], outer: Callable[..., Tensor], inner: Callable[..., Tensor]
    ) -> Tensor:
        """Return (B, n, ...) for tensors (B, n, ...): what outer(*their tokens (1, t, ...)) returns
        for documents that states may enter or leave, inner for the others."""
        out = outer(*(x.flatten(0, 1)[None, self._outer] for x in given))
        if len(self._inner):
            others = inner(*(x.flatten(0, 1)[None, self._inner] for x in given))
            out = torch.cat((out, others), 1)
        return out[0, self._back].unflatten(0, given[0].shape[:2])

    def _find_runs(self, places: Tensor, edges: Tensor, real: Tensor, rank: int) -> None:
        """Find where the runs of all devices stand in the sequence, on the host."""
        rows, ranks, _ = places.shape
        number = edges.cumsum(2) - 1
        row, device, token = real.nonzero(as_tuple=True)
        count = int(number[row, device, token].max()) + 1  # k
        start = torch.full((ranks, rows, count), FAR)
        start[device, row, number[real]] = places[real]
        # (B, R k), in the sequence's order; then their places in what is gathered.
        self._sorted, order = start.transpose(0, 1).flatten(1).sort(dim=1)
        each = torch.arange(rows)[:, None]
        order = (order // count * rows + each) * count + order % count
        # (r,), the row of each own run, whether it is one of tokens, and where it is in the order.
        self._row, token = edges[:, rank].nonzero(as_tuple=True)
        own = real[self._row, rank, token]
        place = (rank * rows + self._row) * count + number[self._row, rank, token]
        self._at = (order[self._row] == place[:, None]).int().argmax(1)
        # (B k,), the run in each place of what this device gives; any where it has fewer.
        slots = torch.zeros(rows * count, dtype=torch.int64)
        slots[place[own] - rank * rows * count] = own.nonzero()[:, 0]
        to = self.bounds.device
        self._order, self._slots = order.T.to(to), slots.to(to)

    def entering(self, map_: Tensor, added: Tensor) -> Tensor:
        """Return the states before this device's runs, (r, H, K, V); all devices must call it.

        Args:
            map_: A of each run, (r, H, K, K), or (r, H, 1, 1) where it is a number.
            added: N of each run, (r, H, K, V).
        """
        width = map_.shape[3]
        given = torch.cat((map_.expand(*added.shape[:3], -1), added), 3)[self._slots]
        # One collective: two could change their order in the backward.
        found = self.gather(given).flatten(0, 1)
        # Not plain zeros: also the first device's result depends on what is gathered, since one
        # that leaves the backward's collective stops the others. No product with 0, which would
        # pass on another document's NaN.
        every = self._passes.new_ones(())
        states = [found[self._order[0], ..., width:].masked_fill(every, 0)]
        for run, passes in zip(self._order[: int(self._at.max())], self._passes, strict=False):
            map_, more = found[run].tensor_split((width,), 3)
            state = map_ @ states[-1] if width == added.shape[2] else map_ * states[-1]
            states.append(torch.where(passes[:, None, None, None], state, 0) + more)
        own = zip(self._at.tolist(), self._row.tolist(), strict=True)
        before = torch.stack([states[place][row] for place, row in own])
        return torch.where((self._before > 0)[:, None, None, None], before, 0)

    def read(self, reads: Tensor, states: Tensor) -> Tensor:
        """Return reads (1, t, H, K) of the states before their runs (r, H, K, V), (1, t, H, V)."""
        found = torch.einsum("rlhk,rhkv->rlhv", self.runs.split(reads), states)
        return torch.where(self.carries[:, None, None], self.runs.join(found, reads), 0)

    def with_halos(self, x: Tensor, width: int) -> tuple[Tensor, Rows, Tensor]:
        """Return x (B, D, n) with W = `width` tokens before each run, (1, D, T + r W), zeros where
        they are of another document; its rows; where x's tokens are in it, (T,). All devices must
        call it."""
        if width not in self._halos:
            self._halos[width] = self._find_halos(width)
        index, within, own, tails = self._halos[width]
        flat = x.transpose(0, 1).flatten(1)
        others = self.gather(flat[:, tails]).transpose(0, 1).flatten(1)  # (D, R B k W)
        return (
            torch.cat((flat, others, flat.new_zeros(len(flat), 1)), 1)[None, :, index],
            within,
            own,
        )

    def _find_halos(self, width: int) -> tuple[Tensor, Rows, Tensor, Tensor]:
        device, tokens, runs = self.bounds.device, self.since.numel(), len(self._starts)
        starts, order = self._sorted[self._row], self._order.T.cpu()[self._row]  # (r, R k)
        back = torch.arange(width, 0, -1)
        wanted = (starts.gather(1, self._at[:, None]) - back).clamp(min=0)  # (r, W), tokens
        run = torch.searchsorted(starts, wanted, right=True) - 1
        ends = starts.gather(1, (run + 1).clamp(max=starts.shape[1] - 1))
        source = tokens + order.gather(1, run) * width + width - (ends - wanted)
        nothing = tokens + self._order.numel() * width
        inside = self._before[:, None] >= back.to(device)
        source = torch.where(inside, source.to(device), nothing)
        own = torch.arange(tokens, device=device)
        place = own + (self._number + 1) * width
        halos = place[self._starts][:, None] - back.to(device)
        index = halos.new_empty(tokens + runs * width).index_copy(0, place, own)
        index = index.index_copy(0, halos.flatten(), source.flatten())
        begins = torch.zeros_like(index, dtype=torch.bool)
        begins[place[self.bounds[:-1].long()]] = True
        begins[place[self._starts]], begins[halos[:, 0]] = False, True
        tails = (self._ends[self._slots][:, None] + 1 - back.to(device)).clamp(min=0).flatten()
        return index, Rows(begins[None], begins[None]), place, tails
