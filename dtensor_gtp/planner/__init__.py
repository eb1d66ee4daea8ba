"""Predicts time and memory of a step, and searches the axes of a job: ``python -m dtensor_gtp.help planner``."""

from .errors import PlanError
from .evaluate import Answer
from .job import Job, Layout
from .machine import Machine, load_machine, preset_names
from .memory import Memory

__all__ = ["Answer", "Job", "Layout", "Machine", "Memory", "PlanError", "load_machine", "preset_names"]
