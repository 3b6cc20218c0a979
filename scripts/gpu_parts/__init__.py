"""The sections of scripts/mac_check and scripts/gpu."""
