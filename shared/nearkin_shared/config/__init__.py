"""Settings: sections, loader, validators, profiles and their reference."""
