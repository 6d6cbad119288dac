"""The functions that a training step minimises. A YAML's ``loss`` names one of them or a subclass of ``Objective``."""

from rocm_ext.objectives.clipped_ratio import ClippedRatio
from rocm_ext.objectives.cross_entropy import CrossEntropy, objective_of
from rocm_ext.objectives.objective import Objective

__all__ = ["ClippedRatio", "CrossEntropy", "Objective", "objective_of"]
