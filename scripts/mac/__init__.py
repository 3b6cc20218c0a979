"""The sections of scripts/mac_check."""
