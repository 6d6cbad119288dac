"""The functions that a training step minimises. A YAML's ``loss`` names one of them or a subclass of ``Objective``."""

from rocm_ext.objectives.clipped_ratio import ClippedRatio
from rocm_ext.objectives.cross_entropy import CrossEntropy, objective_of
from rocm_ext.objectives.objective import Objective
from rocm_ext.objectives.policy_gradient import PolicyGradient
from rocm_ext.objectives.preference import Preference
from rocm_ext.objectives.tally import Tally

__all__ = ["ClippedRatio", "CrossEntropy", "Objective", "PolicyGradient", "Preference", "Tally", "objective_of"]
