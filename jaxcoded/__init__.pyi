"""Coded collective operations for JAX over MPI: an all-reduce whose sum is exact
although some ranks are left out."""

from jaxcoded import baselines as baselines
from jaxcoded import codes as codes
from jaxcoded import host as host
from jaxcoded import kernels as kernels
from jaxcoded import optax as optax
from jaxcoded.codes import GradientCode as GradientCode
from jaxcoded.collectives import coded_allreduce as coded_allreduce
from jaxcoded.collectives import coded_reduce as coded_reduce
from jaxcoded.collectives import tree_bcast as tree_bcast
from jaxcoded.errors import CodedError as CodedError
from jaxcoded.errors import DeadlineExceeded as DeadlineExceeded
from jaxcoded.errors import Desynchronized as Desynchronized
from jaxcoded.errors import GroupClosed as GroupClosed
from jaxcoded.errors import GroupMismatch as GroupMismatch
from jaxcoded.errors import TooManyErasures as TooManyErasures
from jaxcoded.group import CodedGroup as CodedGroup
from jaxcoded.kernels import Encoded as Encoded
from jaxcoded.nonblocking import Handle as Handle
from jaxcoded.nonblocking import coded_allreduce_done as coded_allreduce_done
from jaxcoded.nonblocking import coded_allreduce_start as coded_allreduce_start
from jaxcoded.plan import Plan as Plan
from jaxcoded.plan import make_plan as make_plan
from jaxcoded.rounds import settle as settle
from jaxcoded.training import coded_value_and_grad as coded_value_and_grad
from jaxcoded.weights import Weights as Weights
