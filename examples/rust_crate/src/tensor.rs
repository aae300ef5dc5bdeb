// Views of slices with a shape, which is checked against the slice's length: the one thing about
// memory that the library cannot check for itself.
use crate::error::{sized, Error, Result};
use crate::ffi;
use std::marker::PhantomData;
use std::os::raw::c_void;

/// # Safety
/// `DTYPE` is the type of the elements, every pattern of whose bits is a value.
pub unsafe trait Element: Copy {
    const DTYPE: i32;
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct F16(pub u16);
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Bf16(pub u16);

unsafe impl Element for i32 {
    const DTYPE: i32 = ffi::DTYPE_I32;
}
unsafe impl Element for i64 {
    const DTYPE: i32 = ffi::DTYPE_I64;
}
unsafe impl Element for F16 {
    const DTYPE: i32 = ffi::DTYPE_F16;
}
unsafe impl Element for Bf16 {
    const DTYPE: i32 = ffi::DTYPE_BF16;
}
unsafe impl Element for f32 {
    const DTYPE: i32 = ffi::DTYPE_F32;
}

/// A tensor that is read: it borrows the slice for as long as anything may read it.
#[derive(Clone, Copy)]
pub struct View<'a> {
    pub(crate) tensor: ffi::Tensor,
    memory: PhantomData<&'a ()>,
}

/// A tensor that is written.
pub struct ViewMut<'a> {
    pub(crate) tensor: ffi::Tensor,
    memory: PhantomData<&'a mut ()>,
}

impl<'a> View<'a> {
    pub fn new<T: Element>(data: &'a [T], shape: &[usize]) -> Result<View<'a>> {
        let tensor = tensor_of::<T>(data.as_ptr() as *mut c_void, data.len(), shape)?;
        Ok(View {
            tensor,
            memory: PhantomData,
        })
    }
}

impl<'a> ViewMut<'a> {
    pub fn new<T: Element>(data: &'a mut [T], shape: &[usize]) -> Result<ViewMut<'a>> {
        let tensor = tensor_of::<T>(data.as_mut_ptr() as *mut c_void, data.len(), shape)?;
        Ok(ViewMut {
            tensor,
            memory: PhantomData,
        })
    }
}

fn tensor_of<T: Element>(data: *mut c_void, len: usize, shape: &[usize]) -> Result<ffi::Tensor> {
    let elements = shape
        .iter()
        .try_fold(1usize, |product, size| product.checked_mul(*size));
    if shape.len() > ffi::MAX_RANK || elements != Some(len) {
        let what = format!("a slice of {} elements has not the shape {:?}", len, shape);
        return Err(Error::of_argument(ffi::ERROR_SHAPE, "shape", what));
    }
    let mut tensor: ffi::Tensor = unsafe { sized() };
    tensor.data = data;
    tensor.dtype = T::DTYPE;
    tensor.rank = shape.len() as i32;
    for (to, size) in tensor.shape.iter_mut().zip(shape) {
        *to = *size as i64;
    }
    Ok(tensor)
}
