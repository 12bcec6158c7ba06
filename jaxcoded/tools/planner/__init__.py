"""Find the fastest plan on a cluster."""

from jaxcoded.tools.planner.search import Estimate as Estimate
from jaxcoded.tools.planner.search import LeftOut as LeftOut
from jaxcoded.tools.planner.search import Ranking as Ranking
from jaxcoded.tools.planner.search import best_plans as best_plans
