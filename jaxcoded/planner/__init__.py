"""Which plan is the fastest on a cluster."""

from jaxcoded.planner.search import Estimate as Estimate
from jaxcoded.planner.search import LeftOut as LeftOut
from jaxcoded.planner.search import Ranking as Ranking
from jaxcoded.planner.search import best_plans as best_plans
