"""Who codes what over whom, and who reads what. Without JAX and MPI."""

from jaxcoded.plan.plan import Plan as Plan
from jaxcoded.plan.plan import make_plan as make_plan
