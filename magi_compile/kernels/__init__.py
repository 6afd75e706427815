"""Running a plan on one device. One interface (`base`), one selection rule (`select`)."""
