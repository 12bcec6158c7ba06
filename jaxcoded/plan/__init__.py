"""The tree, the code of each parent, and what each rank reads. Without JAX and MPI."""

from jaxcoded.plan.plan import Plan as Plan
from jaxcoded.plan.plan import make_plan as make_plan
