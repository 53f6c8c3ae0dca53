"""Planning: the numeric part without M, the schedule with it, and the plan that explains both."""

from .numeric import NumericPlan, default_contract, numeric_plan
from .plan import Plan, plan

__all__ = ["NumericPlan", "Plan", "default_contract", "numeric_plan", "plan"]
