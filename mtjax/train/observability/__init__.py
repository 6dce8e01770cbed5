"""What a run says of itself: where its time goes, its metrics, its progress, and whether its devices agree."""
