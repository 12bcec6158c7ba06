"""Strategies, the plans made from them, and the examples of each rank, without JAX and
MPI.
"""

from jaxcoded.plan.coded import Coded as Coded
from jaxcoded.plan.plan import Plan as Plan
from jaxcoded.plan.plan import make_plan as make_plan
from jaxcoded.plan.shared import Shared as Shared
from jaxcoded.plan.strategy import Strategy as Strategy
from jaxcoded.plan.uncoded import Uncoded as Uncoded
