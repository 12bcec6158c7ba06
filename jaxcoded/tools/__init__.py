"""The tools in addition to the library: the planner, the simulator and the command
line. ``import jaxcoded`` imports none of them.
"""
