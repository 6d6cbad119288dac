"""The commands of a Linux distribution that fixes consist of."""

import re
from collections.abc import Mapping

# The commands to install a package and to upgrade the system, by the words of ID and ID_LIKE in os-release
_MANAGERS = {
    "debian": ("sudo apt install", "sudo apt update && sudo apt full-upgrade"),
    "ubuntu": ("sudo apt install", "sudo apt update && sudo apt full-upgrade"),
    "fedora": ("sudo dnf install", "sudo dnf upgrade --refresh"),
    "rhel": ("sudo dnf install", "sudo dnf upgrade --refresh"),
    "arch": ("sudo pacman -S", "sudo pacman -Syu"),
    "suse": ("sudo zypper install", "sudo zypper update"),
}
# By ID alone: immutable systems derived from Fedora name it in ID_LIKE and set kernel parameters otherwise
_WITH_GRUBBY = ("fedora", "rhel", "centos", "rocky", "almalinux")
_REBOOT = "  # then reboot"


class Distribution:
    """A distribution, known by its os-release; of an unknown one the commands are instructions.

    Args:
        release: the keys and values of os-release.
    """

    def __init__(self, release: Mapping[str, str]) -> None:
        self._release = release
        self.name = release.get("PRETTY_NAME", "")
        self._id = release.get("ID", "")
        self._family = f"{self._id} {release.get('ID_LIKE', '')}".split()  # the nearest first
        self._install = self._upgrade = ""
        for word in self._family:
            if word in _MANAGERS:
                self._install, self._upgrade = _MANAGERS[word]
                break

    def install(self, package: str) -> str:
        """The command that installs a package."""
        if self._install:
            return f"{self._install} {package}"
        return f"install {package} with the package manager"

    @property
    def upgrade(self) -> str:
        """The command that upgrades all packages."""
        return (self._upgrade or "upgrade all packages") + _REBOOT

    @property
    def newer_kernel(self) -> str:
        """The command for a newer kernel. On Ubuntu an upgrade keeps the release's kernel."""
        if self._id != "ubuntu":
            return self.upgrade
        release = self._release.get("VERSION_ID", "")
        long_term = re.fullmatch(r"(\d[02468])\.04", release)
        if long_term and release >= "24.04":  # its newer kernels have gfx1151's fixes
            return f"sudo apt update && sudo apt install linux-generic-hwe-{release}{_REBOOT}"
        return f"sudo do-release-upgrade{_REBOOT}"

    def boot(self, add: str = "", remove: str = "") -> str:
        """How to change the kernel's command line: a command, or an instruction where the boot loader is unknown.

        Args:
            add: parameters to add, with their values, separated by spaces.
            remove: name of a parameter to remove.
        """
        if self._family[:1] and self._family[0] in _WITH_GRUBBY:
            removal = f"--remove-args='{remove}'" if remove else ""
            addition = f"--args='{add}'" if add else ""
            return f"sudo grubby --update-kernel=ALL {f'{removal} {addition}'.strip()}{_REBOOT}"
        if "debian" in self._family or "ubuntu" in self._family:
            return f"sudo sed -E -i '{_edit_of_grub(add, remove)}' /etc/default/grub && sudo update-grub{_REBOOT}"
        changes = []
        if remove:
            changes.append(f"remove {remove}")
        if add:
            changes.append(f"add {add}")
        return f"in the boot loader's kernel command line {' and '.join(changes)}"


def _edit_of_grub(add: str, remove: str) -> str:
    """The script for sed that removes old values of parameters from /etc/default/grub and adds new ones."""
    names = [word.partition("=")[0] for word in add.split()]
    if remove:
        names.insert(0, remove)
    # \x27 is the other quote that the file may have
    script = rf'/^GRUB_CMDLINE_LINUX/s/ *\<({"|".join(names)})\>(=[^ "\x27]*)?//g'
    if add:
        script += rf'; s/^(GRUB_CMDLINE_LINUX_DEFAULT=["\x27].*)(["\x27])/\1 {add}\2/'
    return script
