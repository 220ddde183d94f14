"""What a device knows of drafts: by slot, and of the rows and the place for which a step proposes some."""

from dataclasses import dataclass

from torch import Tensor

from proa_engine.kernels.launch import INTERPRETED


@dataclass(frozen=True, slots=True, eq=False)
class DraftState:
    """What is kept of drafts by slot, with N slots, W ways to draw and at most M draft tokens of a step."""

    token_ids: Tensor  # [N, length] int32: draft tokens are written behind a request's tokens
    lengths: Tensor  # [N] int64: tokens of each slot's request
    can_draft: Tensor  # [N + 1] int64: 1, or 0 for a request that can have no drafts yet
    drafts: Tensor  # [N + 1, M] int64: the step's draft tokens; NONE: no draft token
    first: Tensor  # [N + 1, W] int64: what each way proposes as the first draft token
    params: Tensor  # [N, NUM_COLUMNS] float64, see `sampling_params`
    factors: Tensor  # [W] float64: of the request's temperature, by way
    bounds: Tensor  # [ranges - 1] float64: the temperatures between the ranges
    matches: Tensor  # [ranges, W] float64: how often each way's first draft token was the sample, of late

    @property
    def is_host(self) -> bool:
        return self.lengths.is_cpu and not INTERPRETED


@dataclass(frozen=True, slots=True, eq=False)
class DraftPlace:
    """The next draft token of D rows: where it lies, and the entry that comes before it."""

    values: Tensor  # [5, D] int64

    @property
    def token_ids(self) -> Tensor:
        """[D]: the token before it. Of a row without room: any."""
        return self.values[0]

    @property
    def positions(self) -> Tensor:
        """[D]"""
        return self.values[1]

    @property
    def entries(self) -> Tensor:
        """[3, D]: rows as `decode_inputs` takes them, of one token, which is the one before `token_ids`; rows that have
        no room for the draft token are padding."""
        return self.values[2:]


@dataclass(frozen=True, slots=True, eq=False)
class DraftRows:
    """D rows for which draft tokens are proposed."""

    values: Tensor  # [7, D] int64
    params: Tensor  # [W + 1, D, NUM_COLUMNS] float64: the sampling parameters by way, then those of the way in use

    @property
    def slots(self) -> Tensor:
        """[D]"""
        return self.values[0]

    @property
    def lengths(self) -> Tensor:
        """[D]: tokens of the rows' requests"""
        return self.values[2]

    @property
    def room(self) -> Tensor:
        """[D]: how many draft tokens each can have. Of padding: 0 or less."""
        return self.values[4]

    @property
    def index(self) -> Tensor:
        """[D]: 0, 1, …"""
        return self.values[6]
