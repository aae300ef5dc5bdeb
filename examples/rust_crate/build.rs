// Links with the conclave that pkg-config finds; PKG_CONFIG_PATH names one that is elsewhere. Names
// and folders, and no arguments of the linker: only those reach the programs that use this crate.
use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-env-changed=PKG_CONFIG_PATH");
    let output = Command::new("pkg-config")
        .args(["--libs", "conclave"])
        .output()
        .expect("pkg-config is installed");
    if !output.status.success() {
        panic!("pkg-config: {}", String::from_utf8_lossy(&output.stderr));
    }
    for word in String::from_utf8_lossy(&output.stdout).split_whitespace() {
        match word {
            "-pthread" => println!("cargo:rustc-link-lib=pthread"),
            _ if word.starts_with("-L") => println!("cargo:rustc-link-search={}", &word[2..]),
            _ if word.starts_with("-l") => println!("cargo:rustc-link-lib={}", &word[2..]),
            _ => link_file(Path::new(word)),
        }
    }
}

// "/opt/lib/libmpi.so" is "mpi" in "/opt/lib".
fn link_file(path: &Path) {
    let name = path
        .file_stem()
        .and_then(|stem| stem.to_str())
        .unwrap_or("");
    match (path.parent(), name.strip_prefix("lib")) {
        (Some(folder), Some(name)) => {
            println!("cargo:rustc-link-search={}", folder.display());
            println!("cargo:rustc-link-lib={}", name);
        }
        _ => panic!(
            "pkg-config names a library in words of its own: {}",
            path.display()
        ),
    }
}
