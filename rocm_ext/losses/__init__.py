"""The functions that a training step minimises. A YAML's ``loss`` names one of them or a subclass of ``Objective``."""

from rocm_ext.losses.clipped_ratio import ClippedRatio
from rocm_ext.losses.cross_entropy import CrossEntropy, objective_of
from rocm_ext.losses.objective import Objective
from rocm_ext.losses.policy_gradient import PolicyGradient
from rocm_ext.losses.preference import Preference
from rocm_ext.losses.tally import Tally

__all__ = ["ClippedRatio", "CrossEntropy", "Objective", "PolicyGradient", "Preference", "Tally", "objective_of"]
