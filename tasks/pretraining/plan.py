def describe(*a):
    return ""


def plot_schedule(*a):
    return False
