"""Studies: settings times seeds, trained, measured and compared."""
