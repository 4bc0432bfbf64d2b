"""The progress of a stage: reported, served over HTTP, and counted for the watchdog; requests to save early."""
