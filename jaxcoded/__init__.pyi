"""Coded collective operations for JAX over MPI: an all-reduce whose sum is exact
although some ranks are left out."""

from jaxcoded import codes as codes
from jaxcoded import errors as errors
from jaxcoded._version import __version__ as __version__
from jaxcoded.codes import GradientCode as GradientCode
from jaxcoded.collectives import baselines as baselines
from jaxcoded.collectives import host as host
from jaxcoded.collectives import optax as optax
from jaxcoded.collectives.allreduce import coded_allreduce as coded_allreduce
from jaxcoded.collectives.allreduce import coded_reduce as coded_reduce
from jaxcoded.collectives.allreduce import tree_bcast as tree_bcast
from jaxcoded.collectives.coded_sum import coded_sum as coded_sum
from jaxcoded.collectives.nonblocking import Handle as Handle
from jaxcoded.collectives.nonblocking import (
    coded_allreduce_done as coded_allreduce_done,
)
from jaxcoded.collectives.nonblocking import (
    coded_allreduce_start as coded_allreduce_start,
)
from jaxcoded.collectives.spread import spread as spread
from jaxcoded.collectives.value_and_grad import (
    coded_value_and_grad as coded_value_and_grad,
)
from jaxcoded.errors import CodedError as CodedError
from jaxcoded.errors import DeadlineExceeded as DeadlineExceeded
from jaxcoded.errors import Desynchronized as Desynchronized
from jaxcoded.errors import GroupClosed as GroupClosed
from jaxcoded.errors import GroupMismatch as GroupMismatch
from jaxcoded.errors import InconsistentMessages as InconsistentMessages
from jaxcoded.errors import TooManyErasures as TooManyErasures
from jaxcoded.group.batch import Batch as Batch
from jaxcoded.group.group import CodedGroup as CodedGroup
from jaxcoded.group.weights import Weights as Weights
from jaxcoded.plan import Coded as Coded
from jaxcoded.plan import Plan as Plan
from jaxcoded.plan import Shared as Shared
from jaxcoded.plan import Strategy as Strategy
from jaxcoded.plan import Uncoded as Uncoded
from jaxcoded.plan import make_plan as make_plan
from jaxcoded.transport import kernels as kernels
from jaxcoded.transport.check import DEBUG as DEBUG
from jaxcoded.transport.check import Check as Check
from jaxcoded.transport.kernels import Encoded as Encoded
from jaxcoded.transport.leaving import leave_on_sigterm as leave_on_sigterm
from jaxcoded.transport.options import Options as Options
from jaxcoded.transport.primitive import effects_barrier as effects_barrier
from jaxcoded.transport.result import Result as Result
