"""The script that is rehearsed: counting its steps, ending it after a few, feeding it its largest batch first."""
