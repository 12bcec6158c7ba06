"""The tools that come with the library: the planner, the simulator and the command
line. ``import jaxcoded`` does not import them.
"""
