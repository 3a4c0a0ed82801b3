"""Is a plan right? Its memory and its time, beside those of real steps."""
