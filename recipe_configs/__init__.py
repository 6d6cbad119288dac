"""Run configs (one YAML per machine, model and recipe), the recipes' defaults and the hardware profiles."""
