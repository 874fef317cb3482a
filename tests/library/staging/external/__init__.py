"""Services that Regraft uses: real, emulated or fake ones."""
